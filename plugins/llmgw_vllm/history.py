"""Flags that releases of vLLM have dropped since 0.9, as data.

``gone_in`` is the first without it, of those whose sources were compared (tests/plugins/vllm/flags has their tables).
"""

from __future__ import annotations

from llmgw.engines import list_changes

_GONE: dict[str, dict[str, str | None]] = {
    "0.10.0": {
        "--device": None,
        "--enable-reasoning": "--reasoning-parser",
        "--use-v2-block-manager": None,
        "--tokenizer-pool-size": None,
        "--tokenizer-pool-type": None,
        "--tokenizer-pool-extra-config": None,
        "--long-lora-scaling-factors": None,
        "--qlora-adapter-name-or-path": None,
        "--prompt-adapters": None,
        "--max-prompt-adapters": None,
        "--max-prompt-adapter-token": None,
        "--expand-tools-even-if-tool-choice-none": None,
    },
    "0.10.1": {"--num-scheduler-steps": None, "--multi-step-stream-outputs": None},
    "0.10.2": {"--enable-prompt-adapter": None, "--override-neuron-config": None},
    "0.11.0": {
        "--max-seq-len-to-capture": None,
        "--preemption-mode": None,
        "--scheduler-delay-factor": None,
        "--disable-async-output-proc": None,
        "--guided-decoding-backend": "--structured-outputs-config",
        "--guided-decoding-disable-fallback": "--structured-outputs-config",
        "--guided-decoding-disable-any-whitespace": "--structured-outputs-config",
        "--guided-decoding-disable-additional-properties": "--structured-outputs-config",
    },
    "0.11.1": {"--rope-scaling": "--hf-overrides", "--rope-theta": "--hf-overrides", "--enable-lora-bias": None},
    "0.12.0": {
        "--override-pooler-config": "--pooler-config",
        "--num-lookahead-slots": None,
        "--num-redundant-experts": "--eplb-config",
        "--eplb-window-size": "--eplb-config",
        "--eplb-step-interval": "--eplb-config",
        "--eplb-log-balancedness": "--eplb-config",
        "--lora-extra-vocab-size": None,
    },
    "0.13.0": {
        "--task": "--runner",
        "--cuda-graph-sizes": "--cudagraph-capture-sizes",
        "--disable-mm-preprocessor-cache": "--mm-processor-cache-gb",
        "--enable-multimodal-encoder-data-parallel": "--mm-encoder-tp-mode",
    },
    "0.17.0": {"--disable-log-requests": None, "--logits-processor-pattern": None},
    "0.18.0": {"--swap-space": None, "--use-gpu-for-pooling-score": None},
    "0.19.0": {"--disable-frontend-multiprocessing": None},
    "0.27.0": {"--max-num-partial-prefills": None, "--max-long-partial-prefills": None},
    "0.28.0": {"--calculate-kv-scales": None, "--override-attention-dtype": None},
    "0.31.0": {"--enable-bf16x3-router-gemm": None},
}

CHANGES = list_changes(_GONE)
