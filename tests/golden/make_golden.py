#!/usr/bin/env python3
"""Writes the gradients that crates/model/tests/golden.rs compares with.

Usage: python make_golden.py            (needs torch and numpy; the CPU is used)

Builds each small model below in PyTorch, in fp64, from random weights, runs it forward and backward on packed documents, and
writes weights, batch, loss, logits and all gradients (as fp32) to NAME.safetensors beside this file, with the model's
configuration in the file's metadata. The models are written out here, and not taken from a library, so that the file shows
every formula; run with --check-transformers to compare them with Hugging Face's, where that library is installed.
"""

import json
import math
import pathlib
import struct
import sys

import numpy as np
import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)

BATCH, SEQ, VOCABULARY = 2, 16, 61
GPT2 = dict(family="gpt2", layers=2, width=32, heads=4, ff=72, vocabulary=VOCABULARY, context=20)
LLAMA = dict(family="llama", layers=2, width=32, heads=4, kv_heads=2, ff=56, vocabulary=VOCABULARY, context=16)
SCALING = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
MODELS = {
    "gpt2": dict(GPT2, tied=True, eps=1e-5),
    "gpt2-untied": dict(GPT2, layers=1, tied=False, eps=1e-5),
    "llama": dict(LLAMA, tied=False, eps=1e-5, theta=10000.0),
    # Qwen2: biases, tied; with the frequency scaling of Llama 3.1, and heads whose size is not width / heads.
    "llama-variants": dict(LLAMA, layers=1, tied=True, eps=1e-6, theta=500.0, qkv_bias=True, head_dim=12, rope_scaling=SCALING),
}


def batch(rng):
    """Packed documents: the second sequence holds three, the first one two. A document's last token has no target."""
    tokens = rng.integers(0, VOCABULARY, (BATCH, SEQ))
    starts, targets = np.zeros((BATCH, SEQ), np.int32), np.full((BATCH, SEQ), -1, np.int32)
    for row, bounds in enumerate([[0, 9, SEQ], [0, 1, 6, SEQ]]):
        for begin, end in zip(bounds, bounds[1:]):
            starts[row, begin:end] = begin
            targets[row, begin : end - 1] = tokens[row, begin + 1 : end]
    return tokens.astype(np.int32), targets, starts


def allowed(starts):
    """[batch, 1, query, key]: key is not later than the query and in its document."""
    i = torch.arange(SEQ)
    return ((i[None, None, :] <= i[None, :, None]) & (i[None, None, :] >= starts[:, :, None]))[:, None]


def attention(q, k, v, mask):
    """Heads are [batch, heads, seq, head_dim]."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def gpt2(p, c, tokens, starts):
    width, positions = c["width"], torch.arange(SEQ)[None] - starts
    norm = lambda x, n: F.layer_norm(x, (width,), p[n + ".weight"], p[n + ".bias"], c["eps"])
    linear = lambda x, n: F.linear(x, p[n + ".weight"], p[n + ".bias"])
    x = p["transformer.wte.weight"][tokens] + p["transformer.wpe.weight"][positions]
    for layer in range(c["layers"]):
        h = f"transformer.h.{layer}."
        q, k, v = (heads(t, c["heads"]) for t in linear(norm(x, h + "ln_1"), h + "attn.c_attn").split(width, -1))
        mixed = attention(q, k, v, allowed(starts)).transpose(1, 2).flatten(-2)
        x = x + linear(mixed, h + "attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, h + "ln_2"), h + "mlp.c_fc"), approximate="tanh"), h + "mlp.c_proj")
    table = "transformer.wte.weight" if c["tied"] else "lm_head.weight"
    return norm(x, "transformer.ln_f") @ p[table].T


def frequencies(c, size):
    f = c["theta"] ** (-torch.arange(0, size, 2) / size)
    s = c.get("rope_scaling")
    if s is None:
        return f
    # Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between blended.
    wavelength = 2 * math.pi / f
    original, low, high = s["original_max_position_embeddings"], s["low_freq_factor"], s["high_freq_factor"]
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * f / s["factor"] + smooth * f
    f_scaled = torch.where(wavelength > original / low, f / s["factor"], f)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, blended, f_scaled)


def llama(p, c, tokens, starts):
    size = c.get("head_dim", c["width"] // c["heads"])
    angles = (torch.arange(SEQ)[None] - starts)[:, None, :, None] * frequencies(c, size)
    cos, sin = angles.cos(), angles.sin()

    def rope(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    norm = lambda x, n: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c["eps"]) * p[n + ".weight"]
    linear = lambda x, n: F.linear(x, p[n + ".weight"], p.get(n + ".bias"))
    x = p["model.embed_tokens.weight"][tokens]
    for layer in range(c["layers"]):
        h = f"model.layers.{layer}."
        y = norm(x, h + "input_layernorm")
        q = rope(heads(linear(y, h + "self_attn.q_proj"), c["heads"]))
        k = rope(heads(linear(y, h + "self_attn.k_proj"), c["kv_heads"]))
        v = heads(linear(y, h + "self_attn.v_proj"), c["kv_heads"])
        x = x + linear(attention(q, k, v, allowed(starts)).transpose(1, 2).flatten(-2), h + "self_attn.o_proj")
        y = norm(x, h + "post_attention_layernorm")
        x = x + linear(F.silu(linear(y, h + "mlp.gate_proj")) * linear(y, h + "mlp.up_proj"), h + "mlp.down_proj")
    table = "model.embed_tokens.weight" if c["tied"] else "lm_head.weight"
    return norm(x, "model.norm") @ p[table].T


def shapes(c):
    w, ff, v = c["width"], c["ff"], c["vocabulary"]
    size = c.get("head_dim", w // c["heads"])
    if c["family"] == "gpt2":
        both = lambda n, *s: {n + ".weight": s, n + ".bias": s[:1]}
        out = {"transformer.wte.weight": (v, w), "transformer.wpe.weight": (c["context"], w)}
        for layer in range(c["layers"]):
            h = f"transformer.h.{layer}."
            out |= both(h + "ln_1", w) | both(h + "attn.c_attn", 3 * w, w) | both(h + "attn.c_proj", w, w)
            out |= both(h + "ln_2", w) | both(h + "mlp.c_fc", ff, w) | both(h + "mlp.c_proj", w, ff)
        out |= both("transformer.ln_f", w)
    else:
        q, kv = c["heads"] * size, c["kv_heads"] * size
        out = {"model.embed_tokens.weight": (v, w)}
        for layer in range(c["layers"]):
            h = f"model.layers.{layer}."
            out |= {h + "input_layernorm.weight": (w,), h + "post_attention_layernorm.weight": (w,)}
            for n, rows in (("q", q), ("k", kv), ("v", kv)):
                out[h + f"self_attn.{n}_proj.weight"] = (rows, w)
                if c.get("qkv_bias"):
                    out[h + f"self_attn.{n}_proj.bias"] = (rows,)
            out |= {h + "self_attn.o_proj.weight": (w, q), h + "mlp.gate_proj.weight": (ff, w)}
            out |= {h + "mlp.up_proj.weight": (ff, w), h + "mlp.down_proj.weight": (w, ff)}
        out["model.norm.weight"] = (w,)
    return out if c["tied"] else out | {"lm_head.weight": (v, w)}


def weights(c, rng):
    """Exactly representable in fp32, so that both sides start from the same numbers. Norm weights are near 1."""
    out = {}
    for name, shape in shapes(c).items():
        mean, std = (1.0, 0.2) if "norm" in name or "ln_" in name else (0.0, 0.2)
        mean = 0.0 if name.endswith(".bias") else mean
        out[name] = (mean + std * rng.standard_normal(shape)).astype(np.float32)
    return out


def run(c, values, tokens, targets, starts):
    """Logits, summed loss, and gradients of the mean loss."""
    p = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in values.items()}
    tokens, targets, starts = (torch.tensor(t, dtype=torch.int64) for t in (tokens, targets, starts))
    logits = (gpt2 if c["family"] == "gpt2" else llama)(p, c, tokens, starts)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    (loss / (targets >= 0).sum()).backward()
    return logits.detach(), loss.item(), {n: t.grad for n, t in p.items()}


def save(path, tensors, metadata):
    """The safetensors format: length of the header, header, data."""
    header, data = {"__metadata__": metadata}, b""
    for name, value in tensors.items():
        value = np.ascontiguousarray(value)
        kind = {"float32": "F32", "float64": "F64", "int32": "I32"}[value.dtype.name]
        begin = len(data)
        data += value.tobytes()
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def check_transformers(c, values, tokens, logits):
    """Compares the logits with those of Hugging Face's model, each sequence as one document."""
    import transformers

    size = c.get("head_dim", c["width"] // c["heads"])
    if c["family"] == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=c["vocabulary"], n_positions=c["context"], n_embd=c["width"], n_layer=c["layers"], n_head=c["heads"],
            n_inner=c["ff"], layer_norm_epsilon=c["eps"], tie_word_embeddings=c["tied"],
            bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(config)
        values = {n: v.T if ".c_" in n and v.ndim == 2 else v for n, v in values.items()}
    else:
        kind = "Qwen2" if c.get("qkv_bias") else "Llama"
        scaling = dict(c["rope_scaling"], rope_type="llama3") if "rope_scaling" in c else None
        config = getattr(transformers, kind + "Config")(
            vocab_size=c["vocabulary"], hidden_size=c["width"], intermediate_size=c["ff"], num_hidden_layers=c["layers"],
            num_attention_heads=c["heads"], num_key_value_heads=c["kv_heads"], max_position_embeddings=c["context"],
            rms_norm_eps=c["eps"], tie_word_embeddings=c["tied"], rope_theta=c["theta"], rope_scaling=scaling, head_dim=size,
            bos_token_id=0, eos_token_id=0)
        model = getattr(transformers, kind + "ForCausalLM")(config)
    missing, unexpected = model.load_state_dict({n: torch.tensor(v) for n, v in values.items()}, strict=False)
    assert not unexpected and all("lm_head" in m for m in missing), (missing, unexpected)
    model.tie_weights()
    with torch.no_grad():
        theirs = model.double().eval()(torch.tensor(tokens, dtype=torch.int64)).logits
    return (theirs - logits).abs().max().item()


def main():
    here = pathlib.Path(__file__).parent
    for index, (name, c) in enumerate(MODELS.items()):
        rng = np.random.default_rng(1000 + index)
        tokens, targets, starts = batch(rng)
        values = weights(c, rng)
        if "--check-transformers" in sys.argv:
            logits, _, _ = run(c, values, tokens, targets, np.zeros_like(starts))
            print(f"{name}: largest difference of logits {check_transformers(c, values, tokens, logits):.1e}")
            continue
        logits, loss, gradients = run(c, values, tokens, targets, starts)
        tensors = {"tokens": tokens, "targets": targets, "starts": starts, "loss": np.array([loss])}
        tensors["logits"] = logits.numpy().astype(np.float32)
        tensors |= {"weight." + n: v for n, v in values.items()}
        tensors |= {"gradient." + n: g.numpy().astype(np.float32) for n, g in gradients.items()}
        path = here / f"{name}.safetensors"
        save(path, tensors, {"config": json.dumps(c)})
        print(f"{path.name}: {path.stat().st_size} bytes, loss {loss:.9f}")


main()
