"""Flags that releases of SGLang have dropped since 0.4.6, as data.

``gone_in`` is the first of the releases that were looked at without the flag: these are those that it names, 0.4.6 and
0.5.1. What is gone may be gone since one that lies between.
"""

from __future__ import annotations

from llmgw.engines import list_changes

_GONE: dict[str, dict[str, str | None]] = {
    "0.4.10": {
        "--n-share-experts-fusion": None,
        "--enable-flashinfer-mla": "--attention-backend",
        "--enable-flashmla": "--attention-backend",
        "--impl": "--model-impl",
    },
    "0.5.5": {
        "--enable-ep-moe": "--ep-size",
        "--enable-deepep-moe": "--moe-a2a-backend",
        "--enable-flashinfer-cutlass-moe": "--moe-runner-backend",
        "--enable-flashinfer-mxfp4-moe": "--moe-runner-backend",
        "--enable-flashinfer-trtllm-moe": "--moe-runner-backend",
        "--enable-triton-kernel-moe": "--moe-runner-backend",
        "--max-micro-batch-size": "--pp-max-micro-batch-size",
        "--oltp-traces-endpoint": "--otlp-traces-endpoint",
        "--pdlb-url": None,
        "--debug-tensor-dump-prefill-only": None,
    },
    "0.5.8": {
        "--kt-amx-method": "--kt-method",
        "--kt-amx-weight-path": "--kt-weight-path",
        "--load-watch-interval": None,
    },
    "0.5.10": {
        "--disaggregation-decode-tp": None,
        "--disaggregation-decode-dp": None,
        "--disaggregation-prefill-pp": None,
        "--disaggregation-decode-enable-fake-auto": None,
        "--disable-hicache-numa-detect": None,
        "--mm-max-concurrent-calls": None,
        "--mm-per-request-timeout": None,
        "--speculative-ngram-branch-length": None,
        "--speculative-ngram-max-match-window-size": None,
        "--speculative-ngram-min-match-window-size": None,
    },
    "0.5.11": {
        "--enable-double-sparsity": None,
        "--ds-channel-config-path": None,
        "--ds-heavy-channel-num": None,
        "--ds-heavy-channel-type": None,
        "--ds-heavy-token-num": None,
        "--ds-sparse-decode-threshold": None,
    },
    "0.5.14": {
        "--custom-sigquit-handler": None,
        "--debug-tensor-dump-inject": None,
        "--enable-nan-detection": None,
        "--enable-piecewise-cuda-graph": None,
        "--hybrid-kvcache-ratio": "--swa-full-tokens-ratio",
        "--multi-item-scoring-delimiter": None,
    },
    "0.5.18": {
        "--enable-deepep-waterfill": None,
        "--optimistic-prefill-retries": None,
        "--torchao-config": None,
    },
    "0.5.20": {
        "--collect-tokens-histogram": None,
        "--cuda-graph-bs": "--cuda-graph-bs-decode",
        "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
        "--disable-piecewise-cuda-graph": "--cuda-graph-backend-prefill",
        "--enable-breakable-cuda-graph": "--cuda-graph-backend-prefill",
        "--enforce-piecewise-cuda-graph": "--cuda-graph-backend-prefill",
        "--piecewise-cuda-graph-compiler": None,
        "--piecewise-cuda-graph-max-tokens": "--cuda-graph-max-bs-prefill",
        "--piecewise-cuda-graph-tokens": "--cuda-graph-bs-prefill",
        "--dsa-prefill-cp-mode": "--cp-strategy",
        "--nsa-prefill-cp-mode": "--cp-strategy",
        "--prefill-cp-mode": "--cp-strategy",
        "--enable-dsa-prefill-context-parallel": "--enable-prefill-cp",
        "--enable-nsa-prefill-context-parallel": "--enable-prefill-cp",
        "--enable-prefill-context-parallel": "--enable-prefill-cp",
        "--enable-expert-distribution-metrics": None,
        "--enable-gdn-replayssm-spec": "--enable-linear-replayssm-spec",
        "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
        "--nsa-decode-backend": "--dsa-decode-backend",
        "--nsa-prefill-backend": "--dsa-prefill-backend",
        "--prefill-round-robin-balance": None,
        "--stream-output": "--incremental-streaming-output",
    },
    "0.5.22": {
        "--cuda-graph-tc-compiler": None,
        "--elastic-ep-rejoin": "--elastic-ep-join-mode",
        "--keep-mm-feature-on-device": "--mm-feature-transport",
    },
    "0.5.23": {
        "--speculative-skip-dp-mlp-sync": None,
    },
}

CHANGES = list_changes(_GONE)
