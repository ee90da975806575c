"""A small Qwen3.5-architecture model with random weights: the same tokens by Transformers' own path and by libgdn."""

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

# README begin
import gdn

# README end

torch.manual_seed(0)
config = Qwen3_5TextConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
model = Qwen3_5ForCausalLM(config).eval()
prompt = torch.randint(0, 256, (1, 200))
expected = model.generate(prompt, max_new_tokens=8, do_sample=False)

# README begin
gdn.hf.enable(model)
tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)
# README end

print("calls on libgdn:", gdn.hf.stats(model))
print("tokens equal:", torch.equal(tokens, expected))
assert torch.equal(tokens, expected)
assert gdn.hf.stats(model)
