"""Exporter pages with the fields of dcgm-exporter and node_exporter that a site would configure.

For speed, a node's page is one bytes template that a single `%` fills: 320 numbers take about 0.1 ms.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

DRIVER_VERSION = "570.133.20"
MODEL_NAME = "NVIDIA H100 80GB HBM3"
PCI_BUSES = ("1B", "43", "52", "61", "9D", "C3", "D1", "DF")
IB_BYTES_PER_S = 5e10
XID_MESSAGES = {
    0: "No Error",
    48: "DBE (Double Bit Error) ECC Error",
    63: "ECC Page Retirement or Row Remapping",
    64: "ECC Page Retirement or Row Remapper error",
    79: "GPU has fallen off the bus",
    94: "Contained ECC error",
    95: "Uncontained ECC error",
}


@dataclass(frozen=True, slots=True)
class Field:
    """One metric of a page.

    `format`: %d if the exporter prints the value as an integer, otherwise another format such as %f or %g.
    """

    name: str
    type: str
    help: str
    format: str = "%d"

    @property
    def header(self) -> str:
        return f"# HELP {self.name} {self.help}\n# TYPE {self.name} {self.type}\n"


def _make_gauge(name: str, help: str, format: str = "%d") -> Field:
    return Field(name, "gauge", help, format)


def _make_counter(name: str, help: str, format: str = "%d") -> Field:
    return Field(name, "counter", help, format)


GPU_FIELDS = (
    _make_gauge("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz)."),
    _make_gauge("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz)."),
    _make_gauge("DCGM_FI_DEV_MEMORY_TEMP", "Memory temperature (in C)."),
    _make_gauge("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C)."),
    _make_gauge("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", "%f"),
    _make_counter("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "Total energy consumption since boot (in mJ)."),
    _make_counter("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "Total number of PCIe retries."),
    _make_gauge("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %)."),
    _make_gauge("DCGM_FI_DEV_MEM_COPY_UTIL", "Memory utilization (in %)."),
    _make_gauge("DCGM_FI_DEV_ENC_UTIL", "Encoder utilization (in %)."),
    _make_gauge("DCGM_FI_DEV_DEC_UTIL", "Decoder utilization (in %)."),
    _make_gauge("DCGM_FI_DEV_XID_ERRORS", "Value of the last XID error encountered."),
    _make_gauge("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "Current clock event reasons (bitmask)."),
    _make_gauge("DCGM_FI_DEV_PCIE_MAX_LINK_GEN", "PCIe max link generation."),
    _make_gauge("DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH", "PCIe max link width."),
    _make_gauge("DCGM_FI_DEV_PCIE_LINK_GEN", "PCIe current link generation."),
    _make_gauge("DCGM_FI_DEV_PCIE_LINK_WIDTH", "PCIe current link width."),
    _make_counter("DCGM_FI_DEV_POWER_VIOLATION", "Throttling duration due to power constraints (in ns)."),
    _make_counter("DCGM_FI_DEV_THERMAL_VIOLATION", "Throttling duration due to thermal constraints (in ns)."),
    _make_gauge("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB)."),
    _make_gauge("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB)."),
    _make_gauge("DCGM_FI_DEV_FB_RESERVED", "Framebuffer memory reserved (in MiB)."),
    _make_counter("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "Total number of single-bit volatile ECC errors."),
    _make_counter("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "Total number of double-bit volatile ECC errors."),
    _make_counter("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "Total number of NVLink flow-control CRC errors."),
    _make_counter("DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "Total number of NVLink data CRC errors."),
    _make_counter("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "Total number of NVLink retries."),
    _make_counter("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "Total number of NVLink recovery errors."),
    _make_counter("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "Number of remapped rows for uncorrectable errors"),
    _make_counter("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "Number of remapped rows for correctable errors"),
    _make_gauge("DCGM_FI_DEV_ROW_REMAP_FAILURE", "Whether remapping of rows has failed"),
    _make_gauge("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", "Enforced power limit (in W).", "%f"),
    _make_gauge("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "Ratio of time the graphics engine is active.", "%f"),
    _make_gauge("DCGM_FI_PROF_SM_ACTIVE", "The ratio of cycles an SM has at least 1 warp assigned.", "%f"),
    _make_gauge("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "Ratio of cycles the tensor (HMMA) pipe is active.", "%f"),
    _make_gauge("DCGM_FI_PROF_DRAM_ACTIVE", "Ratio of cycles the device memory interface is active.", "%f"),
    _make_gauge("DCGM_FI_PROF_PCIE_TX_BYTES", "The rate of data transmitted over the PCIe bus in bytes per second."),
    _make_gauge("DCGM_FI_PROF_PCIE_RX_BYTES", "The rate of data received over the PCIe bus in bytes per second."),
    _make_gauge("DCGM_FI_PROF_NVLINK_TX_BYTES", "The rate of data transmitted over NVLink in bytes per second."),
    _make_gauge("DCGM_FI_PROF_NVLINK_RX_BYTES", "The rate of data received over NVLink in bytes per second."),
)

_IB = "node_infiniband_"
PORT_FIELDS = (
    _make_counter(_IB + "port_data_received_bytes_total", "Number of data octets received on all links"),
    _make_counter(_IB + "port_data_transmitted_bytes_total", "Number of data octets transmitted on all links"),
    _make_counter(_IB + "port_packets_received_total", "Number of packets received on all VLs by this port"),
    _make_counter(_IB + "port_packets_transmitted_total", "Number of packets transmitted on all VLs from this port"),
    _make_counter(_IB + "port_transmit_wait_total", "Number of ticks during which the port had data to transmit"),
    _make_counter(_IB + "link_downed_total", "Number of times the link failed to recover and went down"),
    _make_counter(_IB + "link_error_recovery_total", "Number of times the link successfully recovered"),
    _make_counter(_IB + "symbol_error_total", "Number of minor link errors detected on one or more physical lanes."),
    _make_counter(_IB + "port_errors_received_total", "Number of packets containing an error received on this port"),
    _make_counter(_IB + "port_discards_transmitted_total", "Number of outbound packets discarded by the port"),
    _make_counter(
        _IB + "port_receive_remote_physical_errors_total", "Number of packets marked with the EBP delimiter."
    ),
    _make_counter(
        _IB + "local_link_integrity_errors_total", "Number of times local physical errors passed the threshold."
    ),
    _make_counter(_IB + "excessive_buffer_overrun_errors_total", "Number of times that OverrunErrors occurred."),
    _make_counter(_IB + "np_cnp_packets_sent_total", "Number of congestion notifications sent"),
    _make_counter(_IB + "rp_cnp_packets_handled_total", "Number of congestion notifications heeded"),
    _make_counter(_IB + "roce_adp_retransmits_total", "Number of adaptive retransmissions"),
    _make_gauge(_IB + "state_id", "State of the InfiniBand port (1: down, 2: init, 3: armed, 4: active)"),
    _make_gauge(_IB + "physical_state_id", "Physical state of the InfiniBand port (2: polling, 5: link up)"),
    _make_gauge(_IB + "rate_bytes_per_second", "Maximum signal transfer rate", "%g"),
)

HOST_FIELDS = (
    _make_counter("node_pressure_cpu_waiting_seconds_total", "Time that processes have waited for CPU time", "%.6f"),
    _make_counter(
        "node_pressure_io_waiting_seconds_total", "Time that processes have waited due to IO congestion", "%.6f"
    ),
    _make_gauge("node_load1", "1m load average.", "%.2f"),
    _make_gauge("node_memory_MemAvailable_bytes", "Memory information field MemAvailable_bytes.", "%.9g"),
    _make_gauge("node_memory_MemTotal_bytes", "Memory information field MemTotal_bytes.", "%.9g"),
    _make_gauge("node_hwmon_power_average_watt", "Hardware monitor for power usage in watts (average)", "%g"),
)

CPU_MODES = ("idle", "iowait", "irq", "nice", "softirq", "steal", "system", "user")
SHOWN_CPUS = 4
XID_FIELD = "DCGM_FI_DEV_XID_ERRORS"
NAMES_OF_4_6 = {
    "DEV_MEMORY_TEMP": "DEV_MEMORY_TEMP_CELSIUS",
    "DEV_GPU_TEMP": "DEV_GPU_TEMP_CELSIUS",
    "DEV_POWER_USAGE": "DEV_BOARD_POWER_WATTS",
    "DEV_PCIE_REPLAY_COUNTER": "DEV_PCIE_REPLAY_TOTAL",
    "DEV_GPU_UTIL": "DEV_GPU_UTIL_RATIO",
    "DEV_MEM_COPY_UTIL": "DEV_MEM_COPY_UTIL_RATIO",
    "DEV_XID_ERRORS": "DEV_XID_ERROR",
    "PROF_SM_ACTIVE": "PROF_SM_UTIL_RATIO",
    "PROF_PIPE_TENSOR_ACTIVE": "PROF_TENSOR_UTIL_RATIO",
    "PROF_DRAM_ACTIVE": "PROF_DRAM_UTIL_RATIO",
}

GPU_ROW = {field.name: row for row, field in enumerate(GPU_FIELDS)}
PORT_ROW = {field.name.removeprefix(_IB): row for row, field in enumerate(PORT_FIELDS)}
HOST_ROW = {field.name: row for row, field in enumerate(HOST_FIELDS)}
SATURATES_AT = {
    "link_downed_total": 255,
    "link_error_recovery_total": 255,
    "symbol_error_total": 65_535,
    "port_errors_received_total": 65_535,
    "port_discards_transmitted_total": 65_535,
    "local_link_integrity_errors_total": 15,
    "excessive_buffer_overrun_errors_total": 15,
}


def make_gpu_uuid(node: str, gpu: int) -> str:
    """Return a UUID for a GPU, the same in every run."""
    digest = hashlib.sha256(f"{node}/{gpu}".encode()).hexdigest()
    return f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"


def format_gpu_labels(node: str, gpu: int) -> str:
    """Return the labels of a GPU's lines, in the order in which dcgm-exporter 4.x writes them."""
    return (
        f'gpu="{gpu}",UUID="{make_gpu_uuid(node, gpu)}",pci_bus_id="00000000:{PCI_BUSES[gpu % 8]}:00.0",'
        f'device="nvidia{gpu}",modelName="{MODEL_NAME}",Hostname="{node}",DCGM_FI_DRIVER_VERSION="{DRIVER_VERSION}"'
    )


class DcgmPage:
    """The dcgm-exporter page of one node.

    `renamed`: whether the fields and the host label have the names of DCGM 4.6's exporter of 2026.
    """

    def __init__(self, node: str, gpus: int, fields: Sequence[Field] = GPU_FIELDS, renamed: bool = False) -> None:
        self.renamed = renamed
        self._xid_row = next((row for row, field in enumerate(fields) if field.name == XID_FIELD), -1)
        self._fields = (
            [replace(field, name=_translate_field_name(field.name)) for field in fields] if renamed else fields
        )
        self._labels = [format_gpu_labels(node, gpu) for gpu in range(gpus)]
        if renamed:
            self._labels = [labels.replace("Hostname=", "hostname=") for labels in self._labels]
        self._key: tuple[bytes, bytes] | None = None
        self._template = b""

    def render(self, values: NDArray[np.float64], present: NDArray[np.bool_]) -> bytes:
        """Return the page's text for values (field, GPU), in the order of the fields.

        present: (GPU,). Absent GPUs have no lines.
        """
        xids = values[self._xid_row] if self._xid_row >= 0 else np.zeros(len(present))
        key = (present.tobytes(), xids.tobytes())
        if key != self._key:
            self._template = self._build_template(present, xids)
            self._key = key
        shown = values if present.all() else values[:, present]
        return self._template % tuple(shown.ravel().tolist())

    def _build_template(self, present: NDArray[np.bool_], xids: NDArray[np.float64]) -> bytes:
        gpus = np.flatnonzero(present).tolist()
        parts: list[str] = []
        for row, field in enumerate(self._fields):
            parts.append(field.header.replace("%", "%%"))
            for gpu in gpus:
                labels = self._labels[gpu] + (_format_xid_labels(int(xids[gpu])) if row == self._xid_row else "")
                parts.append(f"{field.name}{{{labels}}} {field.format}\n")
        return "".join(parts).encode()


def _translate_field_name(name: str) -> str:
    short = name.removeprefix("DCGM_FI_")
    return f"DCGM_FI_{NAMES_OF_4_6.get(short, short)}"


def _format_xid_labels(xid: int) -> str:
    return f',err_code="{xid}",err_msg="{XID_MESSAGES.get(xid, "Unknown Error")}"'


class NodePage:
    """The node_exporter page of one node.

    Its collectors are infiniband, cpu, pressure, loadavg, meminfo, hwmon and uname.
    """

    def __init__(
        self,
        node: str,
        ports: int,
        port_fields: Sequence[Field] = PORT_FIELDS,
        host_fields: Sequence[Field] = HOST_FIELDS,
        cpus: int = SHOWN_CPUS,
    ) -> None:
        self._cpus = cpus
        parts = [field.header + _format_port_lines(field, ports) for field in port_fields]
        parts.append(
            "# HELP node_infiniband_info Non-numeric data from /sys/class/infiniband/<device>, value is always 1.\n"
            "# TYPE node_infiniband_info gauge\n"
        )
        info = 'board_id="MT_0000000838",firmware_version="28.42.1000",hca_type="MT4129"'
        parts += [f'node_infiniband_info{{{info},device="mlx5_{port}"}} 1\n' for port in range(ports)]
        parts += [_format_cpu_lines(cpus)] if cpus else []
        parts += [field.header + _format_host_line(field) for field in host_fields]
        parts.append(
            "# HELP node_uname_info Labeled system information as provided by the uname system call.\n"
            "# TYPE node_uname_info gauge\n"
            f'node_uname_info{{domainname="(none)",machine="x86_64",nodename="{node}",release="5.15.0-1066",'
            'sysname="Linux",version="#1 SMP"} 1\n'
        )
        self._template = "".join(parts).encode()

    def render(self, ports: NDArray[np.float64], cpu_seconds: NDArray[np.float64], host: NDArray[np.float64]) -> bytes:
        """Return the page's text. ports: (field, port). cpu_seconds: (mode,) of one CPU. host: (field,)."""
        return self._template % (*ports.ravel().tolist(), *cpu_seconds.tolist() * self._cpus, *host.tolist())


def _format_port_lines(field: Field, ports: int) -> str:
    return "".join(f'{field.name}{{device="mlx5_{port}",port="1"}} {field.format}\n' for port in range(ports))


def _format_cpu_lines(cpus: int) -> str:
    head = "# HELP node_cpu_seconds_total Seconds the CPUs spent in each mode.\n# TYPE node_cpu_seconds_total counter\n"
    return head + "".join(
        f'node_cpu_seconds_total{{cpu="{cpu}",mode="{mode}"}} %.2f\n' for cpu in range(cpus) for mode in CPU_MODES
    )


def _format_host_line(field: Field) -> str:
    labels = '{chip="platform_power_meter",sensor="power1"}' if "hwmon" in field.name else ""
    return f"{field.name}{labels} {field.format}\n"
