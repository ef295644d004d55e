import pytest

from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages.text import PageDecoder, Target
from tests.ingest.exporter_pages import Desk, page, reasons


def desk(address: str = "web-1:8000") -> Desk:
    made = Desk("web-1")
    made.decoder = PageDecoder(made.resolver, Target("web-1", address=address))
    return made


def test_vllm_of_both_generations() -> None:
    for cache in ("gpu_cache_usage_perc", "kv_cache_usage_perc"):
        values = desk().decode(
            'vllm:num_requests_running{engine="0",model_name="meta/llama"} 3.0',
            'vllm:num_requests_waiting{engine="0",model_name="meta/llama"} 1.0',
            'vllm:num_requests_waiting_by_reason{engine="0",model_name="meta/llama",reason="capacity"} 1.0',
            f'vllm:{cache}{{engine="0",model_name="meta/llama"}} 0.25',
            'vllm:request_success_total{engine="0",finished_reason="stop",model_name="meta/llama"} 10.0',
            'vllm:request_success_total{engine="0",finished_reason="length",model_name="meta/llama"} 4.0',
            'vllm:generation_tokens_total{engine="0",model_name="meta/llama"} 5000.0',
        )
        name = "default/meta/llama/web-1:8000"
        assert values == {
            f"requests_running {name}": 3.0,
            f"requests_waiting {name}": 1.0,
            f"kv_cache_used {name}": 0.25,
            f"requests_finished {name}": 14.0,
            f"generated_tokens {name}": 5000.0,
        }


def test_the_time_to_first_token_is_a_sum_a_count_and_the_edges_that_we_keep() -> None:
    values = desk().decode(
        'sglang:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 2.0',
        'sglang:time_to_first_token_seconds_bucket{le="0.6",model_name="m"} 3.0',
        'sglang:time_to_first_token_seconds_bucket{le="1.0",model_name="m"} 5.0',
        'sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 7.0',
        'sglang:time_to_first_token_seconds_sum{model_name="m"} 9.5',
        'sglang:time_to_first_token_seconds_count{model_name="m"} 7.0',
    )
    name = "default/m/web-1:8000"
    assert values == {
        f"ttft_le_100ms {name}": 2.0,
        f"ttft_le_1000ms {name}": 5.0,
        f"ttft_s {name}": 9.5,
        f"ttft_requests {name}": 7.0,
    }


def test_sglang_counts_each_thing_once() -> None:
    values = desk().decode(
        'sglang:num_queue_reqs{model_name="m",priority="",tp_rank="0"} 6.0',
        'sglang:num_queue_reqs{model_name="m",priority="1",tp_rank="0"} 4.0',
        'sglang:num_running_reqs{model_name="m",tp_rank="0"} 2.0',
        'sglang:num_running_reqs{model_name="m",tp_rank="1"} 2.0',
        'sglang:generation_tokens_total{is_streaming="true",model_name="m"} 30.0',
        'sglang:generation_tokens_total{is_streaming="false",model_name="m"} 12.0',
        'sglang_token_usage{model_name="m"} 0.5',
    )
    name = "default/m/web-1:8000"
    assert values == {
        f"requests_waiting {name}": 6.0,
        f"requests_running {name}": 2.0,
        f"generated_tokens {name}": 42.0,
        f"kv_cache_used {name}": 0.5,
    }


def test_triton_says_what_it_means_in_a_label() -> None:
    values = desk("t:8002").decode(
        'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 8',
        'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 5',
        'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512',
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.75',
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 900',
        'nv_inference_first_response_histogram_ms_bucket{model="tensorrt_llm",version="1",le="500"} 3',
        'nv_inference_first_response_histogram_ms_sum{model="tensorrt_llm",version="1"} 1500',
        'nv_inference_request_success{model="tensorrt_llm",version="1"} 9',
    )
    name = "default/tensorrt_llm/t:8002"
    assert values == {
        f"requests_waiting {name}": 8.0,
        f"requests_running {name}": 5.0,
        f"kv_cache_used {name}": 0.75,
        f"ttft_le_500ms {name}": 3.0,
        f"ttft_s {name}": 1.5,
        f"requests_finished {name}": 9.0,
    }


def test_tensorrt_llm_with_either_prefix() -> None:
    for prefix in ("trtllm_", "trtllm:"):
        line = f'{prefix}kv_cache_utilization{{engine_type="trtllm",model_name="m"}} 0.6'
        assert desk().decode(line) == {"kv_cache_used default/m/web-1:8000": 0.6}


def test_labels_name_pool_and_instance_where_they_can() -> None:
    made = desk()
    labels = 'model_name="m",namespace="chat",instance="10.0.0.7:8000"'
    made.decode(
        f'vllm:num_requests_running{{engine="0",{labels}}} 1', f'vllm:num_requests_running{{engine="1",{labels}}} 2'
    )
    assert made.names(EntityKind.SERVED_MODEL) == ["chat/m/10.0.0.7:8000", "chat/m/10.0.0.7:8000#1"]
    assert made.names(EntityKind.NODE) == [], "a served model makes no node"


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_running 1",
        'vllm:num_requests_running{model_name="m",instance="a/b"} 1',
        'vllm:num_requests_running{model_name="' + "m" * 300 + '"} 1',
        'vllm:time_to_first_token_seconds_bucket{model_name="m",le="soon"} 1',
    ],
)
def test_what_names_no_model_is_bad(line: str) -> None:
    assert reasons(desk().decoder.decode(page(line), 1000)) == ["bad_label"]
