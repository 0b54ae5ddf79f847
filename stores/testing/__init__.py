"""For tests of stores and of what uses them: an oracle, hostile stores, a simulated device, and the contract as a suite.

Needs pytest. A store of your own passes the contract when a subclass of ``StoreContract`` with its ``make`` does.
"""

from ._hostile import CostlyStore as CostlyStore
from ._hostile import FailingStore as FailingStore
from ._hostile import SlowStore as SlowStore
from ._oracle import OracleStore as OracleStore
from ._simulated import SimulatedDevice as SimulatedDevice
from ._suite import ReadOnlyContract as ReadOnlyContract
from ._suite import StoreContract as StoreContract
from ._values import EVERY_DTYPE as EVERY_DTYPE
from ._values import SAFETENSORS_NAMES as SAFETENSORS_NAMES
from ._values import bits as bits
from ._values import random_bits as random_bits
from ._values import write_npy_file as write_npy_file
from ._values import write_safetensors_file as write_safetensors_file

__all__ = [
    "EVERY_DTYPE",
    "SAFETENSORS_NAMES",
    "CostlyStore",
    "FailingStore",
    "OracleStore",
    "ReadOnlyContract",
    "SimulatedDevice",
    "SlowStore",
    "StoreContract",
    "bits",
    "random_bits",
    "write_npy_file",
    "write_safetensors_file",
]
