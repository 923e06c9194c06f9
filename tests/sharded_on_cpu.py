"""Run a script with FSDP on CPU processes, where accelerate leaves it out, and with small pieces of logits.

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
def make_sharded(self, *args, fsdp_plugin=None, **kwargs):
    make(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


if __name__ == "__main__":
    AcceleratorState.__init__ = make_sharded
    loss.LOGITS_AT_ONCE = 10 * 261
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
