"""Run a script with FSDP or DeepSpeed on CPU processes, where accelerate leaves them out, and with small pieces of
logits.

python tests/sharded_on_cpu.py SCRIPT ...
"""

import functools
import os
import runpy
import sys

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from hf_posswap.training import loss

make = AcceleratorState.__init__


@functools.wraps(make)
def make_sharded(self, *args, fsdp_plugin=None, deepspeed_plugin=None, **kwargs):
    make(self, *args, fsdp_plugin=fsdp_plugin, deepspeed_plugin=deepspeed_plugin, **kwargs)
    if fsdp_plugin is not None and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
    if deepspeed_plugin is not None:
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
        self.distributed_type, self.deepspeed_plugins = DistributedType.DEEPSPEED, deepspeed_plugin
        deepspeed_plugin.set_mixed_precision("no")
        deepspeed_plugin.select(_from_accelerator_state=True)


if __name__ == "__main__":
    AcceleratorState.__init__ = make_sharded
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        os.environ["ACCELERATE_USE_CPU"] = "true"  # its launcher says false
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes of a compiler; gloo does it too
    loss.LOGITS_AT_ONCE = 10 * 261
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
