"""Pages in the form of AMD's device metrics exporter."""

from collections.abc import Mapping

MARKS = {"card_model": "0x74a1", "gpu_compute_partition_type": "spx", "gpu_partition_id": "0"}
HOT = ("processor_hot", "ppt", "socket_thermal", "vr_thermal", "hbm_thermal")
# One healthy GPU of an MI300X at work: number of each name.
HEALTHY = {
    "gpu_gfx_activity": 97.0,
    "gpu_umc_activity": 41.0,
    "gpu_power_usage": 612.0,
    "gpu_package_power": 615.0,
    "gpu_junction_temperature": 71.0,
    "gpu_memory_temperature": 58.0,
    "gpu_energy_consumed": 8.25e12,
    "gpu_total_vram": 196592.0,
    "gpu_used_vram": 151000.0,
    "gpu_free_vram": 45592.0,
    "gpu_ecc_correct_total": 3.0,
    "gpu_ecc_uncorrect_total": 0.0,
    "gpu_ecc_correct_umc": 3.0,
    "pcie_replay_count": 2.0,
    "pcie_speed": 32.0,
    "gpu_health": 1.0,
    **{f"gpu_violation_{name}_residency_percentage": 0.0 for name in HOT},
}
LINKS, DIES = 3, 2


def amd_labels(gpu: int, node: str = "m001", **more: str) -> str:
    pairs = {**MARKS, "gpu_id": str(gpu), "hostname": node, "serial_number": f"6922500{gpu}", **more}
    return "{" + ",".join(f'{key}="{value}"' for key, value in sorted(pairs.items()) if value) + "}"


def amd_lines(gpu: int, node: str = "m001", changed: Mapping[str, float] | None = None, prefix: str = "") -> list[str]:
    """The lines of a GPU; `changed` replaces numbers of HEALTHY, "clock" (MHz) and "link" (KB so far)."""
    numbers = {"clock": 2100.0, "link": 1e9, **HEALTHY, **(changed or {})}
    clock, link = numbers.pop("clock"), numbers.pop("link")
    lines = [f"{prefix}{name}{amd_labels(gpu, node)} {number}" for name, number in numbers.items()]
    for die in range(DIES):
        own = amd_labels(gpu, node, clock_index=str(die), clock_type="system")
        lines.append(f"{prefix}gpu_clock{own} {clock + 10 * die}")
    own = amd_labels(gpu, node, clock_index=str(DIES), clock_type="memory")
    lines.append(f"{prefix}gpu_clock{own} 1300")
    lines.append(f"{prefix}gpu_clock{amd_labels(gpu, node, clock_index='9', clock_type='video')} 29")
    for way in ("rx", "tx"):
        for number in range(LINKS):
            own = amd_labels(gpu, node, link_index=str(number))
            lines.append(f"{prefix}gpu_xgmi_link_{way}{own} {link + number}")
    return lines


def amd_page(changed: Mapping[int, Mapping[str, float]] | None = None, node: str = "m001", gpus: int = 4) -> bytes:
    """changed: GPU → its numbers that differ."""
    lines = ["# HELP gpu_power_usage GPU Power usage in Watts", "# TYPE gpu_power_usage gauge"]
    lines += [line for gpu in range(gpus) for line in amd_lines(gpu, node, (changed or {}).get(gpu))]
    return "".join(f"{line}\n" for line in lines).encode()
