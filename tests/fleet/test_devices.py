"""Names of devices, and which GPU they mean."""

import pytest

from fleetcast.fleet.devices import MOST_PER_NODE, GpuDevices, normalise_device_name


@pytest.mark.parametrize("stated", ["00000000:9B:00.0", "0000:9b:00", "0000:9B:00.0", "PCI:0000:9b:00"])
def test_one_address_has_one_spelling(stated: str) -> None:
    assert normalise_device_name(stated) == "0000:9b:00"


def test_domains_differ() -> None:
    assert normalise_device_name("00000009:01:00.0") == "0009:01:00"
    assert normalise_device_name("mlx5_0/1") == "mlx5_0/1"


def test_a_board_that_moved_is_where_it_was_last_seen() -> None:
    devices = GpuDevices()
    devices.record_device("n1", "GPU-a", 0)
    devices.record_device("n1", "GPU-a", 0)
    assert (devices.find_gpu("n1", "GPU-a"), devices.learnt) == (0, 1)
    devices.record_device("n1", "GPU-a", 3)
    assert devices.find_gpu("n1", "GPU-a") == 3
    assert devices.find_gpu("n2", "GPU-a") is None


def test_a_page_that_names_ever_new_boards_takes_bounded_room() -> None:
    devices = GpuDevices()
    for number in range(2 * MOST_PER_NODE):
        devices.record_device("n1", f"GPU-{number}", 0)
    assert devices.learnt == MOST_PER_NODE
