"""Hints for pages without a known metric: the exporter that probably wrote them, and what to use instead.

    prefix of a name    (exporter, advice)

The longest prefix wins. Names come from the exporters' own lists of metrics.
"""

from collections.abc import Sequence

_DCGM = "scrape dcgm-exporter on these hosts (port 9400)"
_PORTS = "scrape node_exporter on the hosts (port 9100), or add the source sysfs or perfquery"
_KUBERNETES = "add the source kubernetes"
_SERVING = "scrape the hosts' GPUs; its queue is not read"
_HINTS: dict[str, tuple[str, str]] = {
    "nvidia_smi_": ("nvidia_gpu_exporter", _DCGM),
    "nvidia_gpu_": ("nvidia_gpu_prometheus_exporter", _DCGM),
    "nvidia_": ("an exporter of NVIDIA GPUs", _DCGM),
    "nvml_": ("an exporter of NVML", _DCGM),
    "gpu_operator_": ("NVIDIA's GPU operator", _DCGM),
    "dcgm_exporter_": ("dcgm-exporter's own state", "enable GPU fields in its counters file"),
    "dcgm_": ("DCGM fields under other names", "let dcgm-exporter print them as DCGM_FI_…"),
    "rocm_": ("an exporter of rocm-smi", "scrape AMD's device metrics exporter (port 5000)"),
    "amdsmi_": ("an exporter of amd-smi", "scrape AMD's device metrics exporter (port 5000)"),
    "amd_": ("another exporter of AMD GPUs", "scrape AMD's device metrics exporter (port 5000)"),
    "gpu_": ("another exporter of GPUs", f"{_DCGM}, or AMD's device metrics exporter (port 5000)"),
    "infiniband_": ("infiniband_exporter asks the fabric's switches", _PORTS),
    "ib_": ("an exporter of InfiniBand counters", _PORTS),
    "ufm_": ("UFM's telemetry", "add the source ufm"),
    "node_": ("node_exporter older than 0.16, or one with few collectors", "run node_exporter 0.16 or newer"),
    "windows_": ("windows_exporter", "scrape dcgm-exporter on the hosts with GPUs (port 9400)"),
    "kube_": ("kube-state-metrics", _KUBERNETES),
    "kubelet_": ("the kubelet", _KUBERNETES),
    "container_": ("cAdvisor", f"{_KUBERNETES}, and scrape node_exporter (port 9100)"),
    "slurm_": ("an exporter of Slurm", "add the source slurm"),
    "ray_": ("Ray", "scrape dcgm-exporter on its hosts (port 9400)"),
    "tgi_": ("text-generation-inference names no model", _SERVING),
    "hw_": ("OpenTelemetry's hardware metrics", _DCGM),
    "ipmi_": ("ipmi_exporter", "scrape node_exporter, whose hwmon collector reads the board's power"),
    "redfish_": ("a Redfish exporter", "scrape node_exporter, whose hwmon collector reads the board's power"),
    "habanalabs_": ("Intel Gaudi's exporter", "NVIDIA and AMD GPUs are read; Gaudi is not"),
    "xpum_": ("Intel XPU manager", "NVIDIA and AMD GPUs are read; Intel's are not"),
    "npu_": ("an exporter of Ascend NPUs", "NVIDIA and AMD GPUs are read; NPUs are not"),
    "mtml_": ("an exporter of Moore Threads GPUs", "NVIDIA and AMD GPUs are read; others are not"),
    "jetson_": ("an exporter of Jetson boards", "GPUs of hosts are read; Jetson boards are not"),
    "all_smi_": ("all-smi", f"{_DCGM}, or AMD's device metrics exporter (port 5000)"),
    "accelerator_": ("gpud", "add the source gpud"),
    "hostgpu": ("HAMi's scheduler and device plugin", _DCGM),
    "hostcore": ("HAMi's scheduler and device plugin", _DCGM),
    "vgpu": ("HAMi's scheduler and device plugin", _DCGM),
    "mlnx_": ("an exporter of Mellanox counters", _PORTS),
    "rdma_": ("an exporter of RDMA counters", _PORTS),
    "lmdeploy": ("LMDeploy", _SERVING),
    "dynamo_": ("NVIDIA Dynamo", "scrape the page of the engine behind it, such as vLLM or SGLang"),
    "llamacpp": ("llama.cpp", _SERVING),
    "ollama_": ("Ollama", _SERVING),
    "neuron": ("AWS neuron-monitor", "NVIDIA and AMD GPUs are read; Trainium and Inferentia are not"),
    "tpu_": ("a TPU's exporter", "NVIDIA and AMD GPUs are read; TPUs are not"),
    "fleetcast_": ("Fleetcast itself", "scrape the exporters of the hosts"),
    "prometheus_": ("Prometheus itself", "let it send samples by remote_write, or scrape the exporters"),
}
_OTHERS = (
    "expected dcgm-exporter, AMD's device metrics exporter, node_exporter, or a page of vLLM, SGLang, Triton or "
    "TensorRT-LLM"
)
SHOWN_NAMES = 3


def find_hint(name: str) -> tuple[str, str] | None:
    """Return (exporter, advice) for an unknown metric's name, or None if no hint matches it."""
    lower = name.lower()
    if "dcgm_fi_" in lower:  # a collector put a word before it
        return _HINTS["dcgm_"]
    found = [prefix for prefix in _HINTS if lower.startswith(prefix)]
    return _HINTS[max(found, key=len)] if found else None


def describe_unread_page(names: Sequence[str]) -> str:
    """Return a sentence that lists the unknown names on a page, and what to scrape instead.

    >>> describe_unread_page(["kube_pod_info"])
    'nothing on the page is read: it has kube_pod_info (kube-state-metrics); add the source kubernetes'
    """
    return f"nothing on the page is read: it has {_format_names_and_hint(names)}"


def describe_unread_samples(names: Sequence[str]) -> str:
    """Return a sentence that lists the unknown names of samples, and what to scrape instead."""
    return f"samples arrive and nothing reads them: they are {_format_names_and_hint(names)}"


def _format_names_and_hint(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN_NAMES]) + (", …" if len(names) > SHOWN_NAMES else "")
    found = next(filter(None, map(find_hint, names)), None)
    return f"{shown}; {_OTHERS}" if found is None else f"{shown} ({found[0]}); {found[1]}"
