"""Two host devices, so that chain_method="parallel" runs in parallel."""

import numpyro

numpyro.set_host_device_count(2)
