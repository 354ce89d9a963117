"""The model families that `trace` knows: importing a file registers its family."""

from holdfast.tracing.families import albert, bert, distilbert, gpt2, gpt_neox, llama, opt, t5, timm, torch, vit

__all__ = ["albert", "bert", "distilbert", "gpt2", "gpt_neox", "llama", "opt", "t5", "timm", "torch", "vit"]
