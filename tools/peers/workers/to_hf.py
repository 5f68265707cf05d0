"""Writes a GGUF file as a Hugging Face folder in bfloat16; runs in a peer's environment.

usage: to_hf.py MODEL.gguf FOLDER     (needs torch, transformers, gguf)
"""
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

gguf, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
named = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
AutoModelForCausalLM.from_pretrained(**named, dtype=torch.bfloat16).save_pretrained(folder)
AutoTokenizer.from_pretrained(**named).save_pretrained(folder)
