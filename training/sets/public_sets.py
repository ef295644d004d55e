"""The public data sets that Fleetcast is evaluated on.

None of them is shipped. A user copies them below FLEETCAST_DATA, under these names.
"""

from dataclasses import dataclass

_GITHUB = "https://github.com"
_HELIOS = f"{_GITHUB}/S-Lab-System-Group"


@dataclass(frozen=True, slots=True)
class PublicSet:
    """A public data set: its name, where it is published, and how it is split.

    time: the column that a split uses, "" if rows have no time. home: where the set is published.
    """

    name: str
    what: str
    home: str
    licence: str
    time: str = ""


PUBLIC_SETS = (
    PublicSet("jobs/venus", "GPU jobs of SenseTime Helios Venus", f"{_HELIOS}/HeliosData", "CC-BY-4.0", "submit_time"),
    PublicSet(
        "jobs/ricc",
        "RIKEN RICC jobs with real waits (SWF)",
        "https://www.cs.huji.ac.il/labs/parallel/workload/l_ricc/",
        "Parallel Workloads Archive, acknowledge M. Kurokawa",
        "submit_s",
    ),
    PublicSet("jobs/philly", "Microsoft Philly jobs", f"{_GITHUB}/msr-fiddle/philly-traces", "CC-BY-4.0", "timestamp"),
    PublicSet("demand/venus", "Venus jobs and GPUs per 10 min", f"{_HELIOS}/Lucid", "non-commercial", "time"),
    PublicSet(
        "demand/earth", "Helios Earth per virtual cluster and minute", f"{_HELIOS}/HeliosData", "CC-BY-4.0", "time"
    ),
    PublicSet(
        "demand/philly_nodes", "Philly active nodes per minute", f"{_HELIOS}/HeliosArtifact", "CC-BY-4.0", "time"
    ),
    PublicSet("serving/servegen", "LLM request rates per client", f"{_GITHUB}/alibaba/ServeGen", "Apache-2.0", "t_s"),
    PublicSet(
        "serving/azure_llm_2023", "LLM requests", f"{_GITHUB}/Azure/AzurePublicDataset", "CC-BY-4.0", "TIMESTAMP"
    ),
    PublicSet(
        "serving/genai_2026",
        "GPU duty cycle and load of image serving",
        f"{_GITHUB}/alibaba/clusterdata",
        "research or study",
        "timestamp_anon",
    ),
    PublicSet("placement/openb", "6,212-GPU node and pod lists", f"{_GITHUB}/alibaba/clusterdata", "research or study"),
    PublicSet(
        "placement/lingjun_topology",
        "a three-layer Clos fabric",
        f"{_GITHUB}/alibaba/alibaba-lingjun-dataset-2023",
        "Apache-2.0",
    ),
    PublicSet(
        "placement/topograph", "ibnetdiscover of a 40-switch fabric", f"{_GITHUB}/NVIDIA/topograph", "Apache-2.0"
    ),
    PublicSet("placement/nccl-xml", "NCCL topology XML", f"{_GITHUB}/aws/aws-ofi-nccl", "Apache-2.0"),
    PublicSet("placement/nvidia-smi-topo", "nvidia-smi topo -m", f"{_GITHUB}/Azure/azhpc-images", "MIT"),
    PublicSet("placement/step_times", "step times by placement", f"{_GITHUB}/siasosp23/artifacts", "measure only"),
    PublicSet("interference/gavel", "pairs on K80, P100, V100", f"{_GITHUB}/stanford-futuredata/gavel", "MIT"),
    PublicSet("interference/lucid", "measured co-located pairs", f"{_HELIOS}/Lucid", "non-commercial"),
    PublicSet(
        "carbon",
        "hourly grid carbon intensity",
        f"{_GITHUB}/umassos/decarbonization-potential",
        "Electricity Maps, attribution",
        "Datetime (UTC)",
    ),
    PublicSet(
        "faults/infinitehbd",
        "faults of 400 GPU servers",
        f"{_GITHUB}/stepfun-ai/InfiniteHBD-Trace",
        "Apache-2.0",
        "start_day",
    ),
    PublicSet(
        "faults/straggler_bytedance",
        "operations of one slow job",
        f"{_GITHUB}/ByteDance-Seed/StragglerAnalysis",
        "Apache-2.0",
        "step",
    ),
    PublicSet(
        "faults/megatron_step_times", "step times of CI runs", f"{_GITHUB}/NVIDIA/Megatron-LM", "BSD-3-Clause", "step"
    ),
    PublicSet("faults/xid", "XID catalogue and log lines", f"{_GITHUB}/NVIDIA/NVSentinel", "Apache-2.0"),
    PublicSet("faults/host_logs", "dmesg and lspci with faults", f"{_GITHUB}/leptonai/gpud", "Apache-2.0"),
    PublicSet("telemetry/dcgm-fields", "DCGM field names and ids", f"{_GITHUB}/NVIDIA/DCGM", "Apache-2.0"),
    PublicSet("telemetry/dcgm-exporter-spec", "counter lists", f"{_GITHUB}/NVIDIA/dcgm-exporter", "Apache-2.0"),
    PublicSet("telemetry/dcgm-exporter-captures", "label generations", f"{_GITHUB}/NVIDIA/dcgm-exporter", "quotes"),
    PublicSet("telemetry/dcgm-scrape-h100", "one scrape of 25 hosts", "", "measure only"),
    PublicSet("telemetry/h100-phases", "8 x H100 DCGM at 10 Hz by phase", "", "measure only", "timestamp"),
    PublicSet("telemetry/ib-sysfs-h100", "/sys/class/infiniband trees", "", "Apache-2.0"),
    PublicSet("telemetry/ib-procfs-fixtures", "node_exporter output", f"{_GITHUB}/prometheus/procfs", "Apache-2.0"),
    PublicSet("telemetry/ib-perfquery", "perfquery outputs", "", "Apache-2.0"),
    PublicSet("telemetry/slurm-meta-gcm", "sacct, squeue, sinfo outputs", f"{_GITHUB}/facebookresearch/gcm", "MIT"),
    PublicSet(
        "telemetry/acme-util-cdf", "utilisation of two LLM clusters", f"{_GITHUB}/InternLM/AcmeTrace", "CC-BY-4.0"
    ),
)

TIME_COLUMNS = tuple(dict.fromkeys(row.time for row in PUBLIC_SETS if row.time))


def find_public_set(name: str) -> PublicSet | None:
    return next((row for row in PUBLIC_SETS if row.name == name), None)
