"""Ray and Serve in one process that does what lines on its standard input say. It runs in Ray's own environment.

{"do": "deploy", "app": "own", "policy": {…}}   an application with 1 to 5 replicas; without a policy, Serve's own rule
{"do": "standing", "app": "own"}                {"replicas": 1, "status": "RUNNING"}
{"do": "load", "app": "own", "requests": 2}     so many requests are under way from now on
{"do": "wished"}                                {"bundles": [{"CPU": 4.0}, …]}, as the autoscaler sees them
"""

import json
import sys
import time
from typing import Any

import ray
from ray import serve
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.experimental.internal_kv import _internal_kv_get
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

under_way: dict[str, list[Any]] = {}


@serve.deployment(name="Wait", ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=100)
class Wait:
    async def __call__(self, until_s: float) -> str:
        import asyncio

        while time.time() < until_s:
            await asyncio.sleep(0.1)
        return "done"


def deploy(app: str, policy: dict[str, Any] | None = None) -> None:
    own = {} if policy is None else {"policy": AutoscalingPolicy(**policy)}
    config = AutoscalingConfig(
        min_replicas=1,
        max_replicas=5,
        target_ongoing_requests=1,
        upscale_delay_s=0,
        downscale_delay_s=1,
        metrics_interval_s=0.5,
        look_back_period_s=1,
        **own,
    )
    wait = Wait.options(autoscaling_config=config, graceful_shutdown_timeout_s=1, graceful_shutdown_wait_loop_s=0.1)
    serve.run(wait.bind(), name=app, route_prefix=f"/{app}")


def standing(app: str) -> dict[str, Any]:
    told = serve.status().applications[app]
    states = told.deployments["Wait"].replica_states
    return {"replicas": int(states.get("RUNNING", 0)), "status": str(told.status.value)}


def load(app: str, requests: int) -> None:
    for answer in under_way.pop(app, ()):
        answer.cancel()
    handle = serve.get_app_handle(app)
    under_way[app] = [handle.remote(time.time() + 600) for _ in range(requests)]


def wished() -> dict[str, Any]:
    """From the report of the autoscaler itself, which looks every five seconds."""
    report = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}").get("load_metrics_report") or {}
    return {"bundles": [bundle for bundle, count in report.get("request_demand", ()) for _ in range(count)]}


def main() -> None:
    ray.init(num_cpus=16, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    serve.start(proxy_location="Disabled")
    answers = {"deploy": deploy, "standing": standing, "load": load, "wished": wished}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = answers[command.pop("do")](**command)
        print(json.dumps(answer), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
