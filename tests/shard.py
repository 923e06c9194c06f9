"""Run by torchrun on two CPU processes: FSDP2 from the meta device, as large models are loaded.

torchrun --nproc_per_node 2 tests/shard.py FOLDER - every rank patches an empty model, shards it, gets the weights from
rank 0, and must compute what the whole model computes.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from hf_posswap import from_pretrained, patch_model

dist.init_process_group("gloo")
folder = sys.argv[1]
mesh = init_device_mesh("cpu", (2,))
whole = from_pretrained(folder).eval()

source = AutoConfig.from_pretrained(folder)
record = source.posswap
del source.posswap
for key, value in record["original"].items():
    setattr(source, key, value)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(source).eval()
    patch_model(model, record["scheme"], **record["params"])
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")
for tensor in [*model.modules(), *model.parameters(), *model.buffers()]:
    tensor._is_hf_initialized = False
model.initialize_weights()
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, whole.state_dict() if dist.get_rank() == 0 else {}, options=options)

expected = dict(whole.named_buffers())
for name, buffer in model.named_buffers():
    assert torch.equal(buffer, expected[name]), f"rank {dist.get_rank()}: {name}"
ids = torch.arange(4, 60)[None]
with torch.no_grad():
    torch.testing.assert_close(model(ids).logits, whole(ids).logits)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: equal")
dist.destroy_process_group()
