"""SpeedTorch's API over rowferry's stores: a script changes ``import SpeedTorch`` to this, or no line at all.

    import rowferry.speedtorch as SpeedTorch
    python -m rowferry.speedtorch script.py

All names of SpeedTorch 0.1.6, with its parameters, positions and defaults. One more: ``prefetch``, which gives an existing
loop the pipeline's overlap in one line. It runs without a GPU too, where "cuda" means the CPU.

What is different. Where the original raised or corrupted, this works; elsewhere scripts give what they gave, except:

- A row number out of range is an IndexError. The original wrapped it and used another row. Negative ones count from the end.
- Of a row in several slots the last slot is stored, of weights and of every state alike. It was any of them, and not always
  the same. As before, each slot has a gradient of its own: they are not added up as ``nn.Embedding`` would.
- Optimizer state works with today's torch, for every optimizer whose state is rows and numbers; Adafactor, Muon and LBFGS are
  a TypeError. torch keeps its own step counts. Rprop's step sizes are swapped too, and begin at ``lr``. SGD keeps
  ``momentum_buffer`` with momentum, and nothing without; both are allowed. ``optInit`` needs no step before it. As before,
  Adagrad's ``initial_accumulator_value`` counts for nothing.
- Optimizer state can be seen, saved and loaded: ``saveCupy`` stacks the arrays of a state, ``saveTorch`` keeps a list.
- A variable is found by its name in ``model.named_parameters()``, wherever the optimizer has it; other parameters in the same
  optimizer are left alone. An unknown name is a KeyError, an unknown optimizer a TypeError: they were printed.
- ``*MM`` rows are in the file, mapped: nothing of them is copied to the GPU's memory, and what is written stays in the file.
  So ``DataGadgetMM.insertData`` changes the file it was given. All rows are initialised, in the dtype asked for. Other writers
  are kept from a file until the object is gone. ``CPUPinn`` makes no difference to files.
- ``pinType`` without ``deviceType="cpu"`` makes no difference. Rows go to the parameter's GPU if it has one.
- ``getNumpyVersion`` gives NumPy arrays, also of ``CPUPytorch*``. All PyTorch classes have ``loadTorch``, and it runs nothing
  that is in the file. The arrays of a COM can be seen and saved.
- ``DataGadget`` takes arrays too, and needs no ``gadgetInit``. Data without a dimension is refused.
- Random values are drawn by torch's CPU generator (``torch.manual_seed``), not CuPy's: other numbers of the same distribution.
- No call waits for the whole device, swaps CuPy's allocator, or prints; nothing is said at exit. Work is on torch's current
  stream: a script that uses several orders them, as it must for its own tensors.
- Without CuPy, what were CuPy arrays are NumPy arrays (of GPU memory: tensors).
"""

from ._com import COM as COM
from ._com import COMMM as COMMM
from ._com import CPUPytorchCOM as CPUPytorchCOM
from ._com import GPUPytorchCOM as GPUPytorchCOM
from ._com import PytorchCOM as PytorchCOM
from ._common import _Common as _Common
from ._common import _CommonMM as _CommonMM
from ._common import _CPUPytorchCommon as _CPUPytorchCommon
from ._common import _GPUPytorchCommon as _GPUPytorchCommon
from ._common import _PytorchCommon as _PytorchCommon
from ._gadget import DataGadget as DataGadget
from ._gadget import DataGadgetMM as DataGadgetMM
from ._memory import PMemory as PMemory
from ._memory import PMemory as PMemoryMM
from ._memory import my_pinned_allocator as my_pinned_allocator
from ._memory import my_pinned_allocator as my_pinned_allocatorMM
from ._models import CPUPytorchModelFactory as CPUPytorchModelFactory
from ._models import GPUPytorchModelFactory as GPUPytorchModelFactory
from ._models import ModelFactory as ModelFactory
from ._models import ModelFactoryMM as ModelFactoryMM
from ._models import PytorchModelFactory as PytorchModelFactory
from ._optimizers import CPUPytorchOptimizerFactory as CPUPytorchOptimizerFactory
from ._optimizers import GPUPytorchOptimizerFactory as GPUPytorchOptimizerFactory
from ._optimizers import OptimizerFactory as OptimizerFactory
from ._optimizers import OptimizerFactoryMM as OptimizerFactoryMM
from ._optimizers import PytorchOptimizerFactory as PytorchOptimizerFactory
from ._prefetch import prefetch as prefetch

__all__ = [
    "COM",
    "COMMM",
    "CPUPytorchCOM",
    "CPUPytorchModelFactory",
    "CPUPytorchOptimizerFactory",
    "DataGadget",
    "DataGadgetMM",
    "GPUPytorchCOM",
    "GPUPytorchModelFactory",
    "GPUPytorchOptimizerFactory",
    "ModelFactory",
    "ModelFactoryMM",
    "OptimizerFactory",
    "OptimizerFactoryMM",
    "PMemory",
    "PMemoryMM",
    "PytorchCOM",
    "PytorchModelFactory",
    "PytorchOptimizerFactory",
    "_CPUPytorchCommon",
    "_Common",
    "_CommonMM",
    "_GPUPytorchCommon",
    "_PytorchCommon",
    "my_pinned_allocator",
    "my_pinned_allocatorMM",
    "prefetch",
]
