#!/usr/bin/env python3
"""Cuts samples/ out of a Qwen3-MoE-shaped checkpoint: the first experts of one layer, their router rows, a config.

    tools/make_sample.py QUANTIZED_DIR samples/tiny-modelopt
    tools/make_sample.py BF16_DIR      samples/tiny-bf16

Standard library only. Tensors are copied byte for byte; the router keeps the rows of the experts kept.
"""
import argparse
import json
import pathlib
import re
import struct


def read(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()}


def write(path, tensors):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("target", type=pathlib.Path)
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=2)
    args = parser.parse_args()

    router = f"model.layers.{args.layer}.mlp.gate.weight"
    expert = re.compile(rf"model\.layers\.{args.layer}\.mlp\.experts\.(\d+)\.")
    kept = {}
    for name, (dtype, shape, data) in sorted(read(args.source / "model.safetensors").items()):
        found = expert.match(name)
        if name == router:
            kept[name] = (dtype, [args.experts, shape[1]], data[: len(data) // shape[0] * args.experts])
        elif found and int(found[1]) < args.experts:
            kept[name] = (dtype, shape, data)

    config = json.loads((args.source / "config.json").read_text())
    config["num_experts" if "num_experts" in config else "num_local_experts"] = args.experts
    config["num_experts_per_tok"] = args.top_k
    config["num_hidden_layers"] = args.layer + 1
    config["mlp_only_layers"] = list(range(args.layer))
    configs = {"config.json": config}
    if (args.source / "hf_quant_config.json").exists():
        configs["hf_quant_config.json"] = json.loads((args.source / "hf_quant_config.json").read_text())
    absent = re.compile(r"model\.layers\.(\d+)\.")
    for content in configs.values():  # names of modules that the slice does not hold
        for section, key in ((content.get("quantization_config", {}), "ignore"),
                             (content.get("quantization", {}), "exclude_modules")):
            if key in section:
                section[key] = [m for m in section[key] if (f := absent.match(m)) and int(f[1]) <= args.layer]

    args.target.mkdir(parents=True, exist_ok=True)
    write(args.target / "model.safetensors", kept)
    for name, content in configs.items():
        (args.target / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
