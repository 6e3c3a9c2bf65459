"""Data on many devices, of one process or of two, give what one device gives."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


def train(folder, num_processes, devices_each):
    """What each process wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices_each} --xla_backend_optimization_level=1"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    paths = [folder / f"{num_processes}_{devices_each}_{process}.npz" for process in range(num_processes)]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sharded_child", str(path), str(process), str(num_processes), str(port)],
            cwd=ROOT,
            env=environment,
        )
        for process, path in enumerate(paths)
    ]
    try:
        assert [child.wait(timeout=300) for child in children] == [0] * num_processes
    finally:
        for child in children:
            child.kill()
    return [dict(np.load(path)) for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "devices_each"), [(1, 4), (2, 2)])
def test_many_devices_give_what_one_gives(tmp_path, num_processes, devices_each):
    """100 s."""
    (expected,) = train(tmp_path, 1, 1)
    for found in train(tmp_path, num_processes, devices_each):
        assert found.pop("devices") == num_processes * devices_each
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-4, err_msg=name)
