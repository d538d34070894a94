"""Inference engines that are compared, each run in a process of its own: ``python -m moecache.experiments.stock_engines.ENGINE --help``.

| engine | model files | what happens when the experts do not fit |
|---|---|---|
| `llama_cpp` | one GGUF file, mapped | the kernel drops pages and reads them again |
| `transformers_mmap` | fused safetensors, experts mapped | the same |
| `accelerate_offload` | fused safetensors, experts on "disk" | the same, through the library's hooks |
| `ours` | packed blocks, or any checkpoint | slots hold some experts, the policy decides about the others |

All but `transformers_mmap` can be told to compute on a GPU, which nobody has tried: UNVERIFIED.

All take the same tokens and do the same work (`protocol`): decode them one by one, whatever the engine would have chosen itself.
"""
