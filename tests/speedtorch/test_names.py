"""Every name of SpeedTorch 0.1.6 is there, with the parameters, positions and defaults that it had."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import rowferry.speedtorch as SpeedTorch

MODEL = "model_variable, total_classes, embed_dimension"
STATE = "given_optimizer, total_classes, embed_dimension, model, variable_name"
FLOAT, INT = "torch.float32", "torch.int32"
CONSTRUCTORS = {
    "PMemory": "size",
    "PMemoryMM": "size",
    "my_pinned_allocator": "bsize",
    "my_pinned_allocatorMM": "bsize",
    "_Common": "",
    "_CommonMM": "",
    "_GPUPytorchCommon": "",
    "_CPUPytorchCommon": "",
    "_PytorchCommon": "",
    "ModelFactory": f"{MODEL}, datatype='float32', CPUPinn=False",
    "OptimizerFactory": f"{STATE}, dtype='float32', CPUPinn=False",
    "COM": "total_classes, datatype='uint32', CPUPinn=False",
    "DataGadget": "fileName, CPUPinn=False",
    "ModelFactoryMM": f"{MODEL}, diskname='variable', datatype='float32', CPUPinn=False",
    "OptimizerFactoryMM": f"{STATE}, dtype='float32', CPUPinn=False",
    "COMMM": "total_classes, diskname='COM', datatype='uint32', CPUPinn=False",
    "DataGadgetMM": "fileName, CPUPinn=False",
    "GPUPytorchModelFactory": f"{MODEL}, datatype={FLOAT}",
    "GPUPytorchOptimizerFactory": f"{STATE}, dtype={FLOAT}",
    "GPUPytorchCOM": f"total_classes, datatype={INT}",
    "CPUPytorchModelFactory": f"{MODEL}, datatype={FLOAT}",
    "CPUPytorchOptimizerFactory": f"{STATE}, dtype={FLOAT}",
    "CPUPytorchCOM": f"total_classes, datatype={INT}",
    "PytorchModelFactory": f"{MODEL}, datatype={FLOAT}, deviceType='cuda', pinType=False",
    "PytorchOptimizerFactory": f"{STATE}, dtype={FLOAT}, deviceType='cuda', pinType=False",
    "PytorchCOM": f"total_classes, datatype={INT}",
}
STEPS = "retrievedPosIndexes, retrievedNegIndexes=None"
METHODS = {
    "ModelFactory": {
        "zerosInit": "",
        "uniformDistributionInit": "low, high",
        "normalDistributionInit": "mean, stdDev",
        "variableTransformer": "batchSize, posPerBatch, negPerBatch=None",
        "beforeForwardPass": STEPS,
        "afterOptimizerStep": STEPS,
        "getCupyVar": "",
        "saveCupy": "saveFileName",
        "loadCupy": "loadFileName",
        "getNumpyVersion": "",
        "_getReshapedRetrieval": STEPS,
    },
    "ModelFactoryMM": {"getCupyMM": "", "_preInit": "", "saveCupy": "saveFileName", "getNumpyVersion": ""},
    "PytorchModelFactory": {
        "customInit": "initFunction, *args",
        "getTorchVar": "",
        "saveTorch": "saveFileName",
        "loadTorch": "loadFileName",
    },
    "OptimizerFactory": {"optInit": "", "beforeForwardPass": STEPS, "afterOptimizerStep": STEPS},
    "COM": {"comInit": "CPUPinn=False"},
    "PytorchCOM": {"comInit": ""},
    "DataGadget": {"gadgetInit": "", "getData": "indexes", "insertData": "dataObject, indexes"},
}


def parameters(call: Any) -> str:
    """Names, positions and defaults, without ``self`` and types."""
    shown = []
    for each in inspect.signature(call).parameters.values():
        star = "*" if each.kind is each.VAR_POSITIONAL else ""
        default = "" if each.default is each.empty else f"={each.default!r}"
        shown.append(f"{star}{each.name}{default}")
    return ", ".join(shown)


def test_there_are_26_names_and_prefetch() -> None:
    assert set(SpeedTorch.__all__) == {*CONSTRUCTORS, "prefetch"}
    assert len(CONSTRUCTORS) == 26


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_call_takes_what_it_took(name: str) -> None:
    assert parameters(getattr(SpeedTorch, name)) == CONSTRUCTORS[name]


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_what_they_took(name: str) -> None:
    owner = getattr(SpeedTorch, name)
    assert {method: parameters(getattr(owner, method)).removeprefix("self").removeprefix(", ") for method in METHODS[name]} == (
        METHODS[name]
    )


def test_the_differences_are_listed_in_the_docstring() -> None:
    listed = SpeedTorch.__doc__ or ""
    for word in ("IndexError", "last slot", "Rprop", "initial_accumulator_value", "MM", "allocator", "manual_seed"):
        assert word in listed


@pytest.mark.parametrize("name", ["_Common", "_CommonMM", "_GPUPytorchCommon", "_CPUPytorchCommon", "_PytorchCommon"])
def test_a_base_flattens_indexes_and_holds_nothing(name: str) -> None:
    base = getattr(SpeedTorch, name)()
    assert base._getReshapedRetrieval([[3, 1]], torch.tensor([[2], [0]])).tolist() == [3, 1, 2, 0]
    with pytest.raises(RuntimeError, match="holds nothing yet"):
        base.getNumpyVersion()
