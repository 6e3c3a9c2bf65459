"""Two host devices, so that chain_method="parallel" runs in parallel; ArviZ imported once before workers start."""

import warnings

import numpyro

numpyro.set_host_device_count(2)

# ArviZ 0.x notes in a file that it has warned today: workers that import it at once would race for that file
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import arviz  # noqa: F401
