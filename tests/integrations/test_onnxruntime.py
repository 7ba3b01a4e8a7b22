"""A session of ONNX Runtime as a module: shapes, types, batches, errors, copies."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest
import torch
from onnx import TensorProto
from torch import nn
from torch.autograd import forward_ad

from flops import optional
from flops.errors import BackwardError
from flops.integrations.onnxruntime import OnnxError, OnnxModule
from tests.support.onnx_models import Counting, doubling, graph

FLOAT, HALF, LONG = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
TWO = graph(
    [
        ("Add", ["x", "y"], ["sum"]),
        ("Identity", ["ids"], ["same"]),
        ("Mul", ["x", "table"], ["scaled"]),
    ],
    {
        "x": (FLOAT, ["batch", 3]),
        "y": (FLOAT, ["batch", 3]),
        "ids": (LONG, ["batch"]),
        "table": (FLOAT, [3]),
    },
    {"sum": (FLOAT, ["batch", 3]), "same": (LONG, ["batch"]), "scaled": (FLOAT, ["batch", 3])},
)


def test_inputs_and_outputs_go_by_name() -> None:
    x, y, ids, table = torch.randn(4, 3), torch.randn(4, 3), torch.arange(4), torch.randn(3)
    module = OnnxModule(TWO)
    for found in (module(x, y, ids, table), module(x, table=table, ids=ids.int(), y=y)):
        assert list(found) == ["sum", "same", "scaled"]
        torch.testing.assert_close(found["sum"], x + y)
        torch.testing.assert_close(found["scaled"], x * table)
        assert torch.equal(found["same"], ids)
    chosen = OnnxModule(TWO, outputs=["scaled"])(x, y, ids, table)
    assert list(chosen) == ["scaled"]
    torch.testing.assert_close(OnnxModule(TWO, outputs="sum")(x, y, ids, table), x + y)


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [FLOAT, HALF, TensorProto.DOUBLE])
def test_floats_are_converted_and_come_back(kind: int, given: torch.dtype) -> None:
    x = torch.arange(6).view(2, 3).to(given)
    found = OnnxModule(doubling(kind))(x)
    assert found.dtype == given
    torch.testing.assert_close(found, 2 * x)


def test_integers_are_converted_to_floats_but_not_back() -> None:
    assert OnnxModule(doubling())(torch.ones(1, 3, dtype=torch.long)).tolist() == [[2, 2, 2]]
    with pytest.raises(OnnxError, match=r"'x' takes torch\.int64, got torch\.float32: noise or"):
        OnnxModule(doubling(LONG))(torch.ones(1, 3))


def test_other_devices_are_moved_from_and_back_to() -> None:
    """In a process of its own: the device cannot be unregistered."""
    program = """
import torch
from flops.integrations.onnxruntime import OnnxModule
from tests.support.onnx_models import doubling
from tests.support.simulated_device import DEVICE, Traffic
with Traffic():
    found = OnnxModule(doubling())(torch.full((2, 3), 2.0).to(DEVICE))
    print(found.device == DEVICE, found.cpu().tolist())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.strip() == "True [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]", ran.stderr


@pytest.mark.parametrize("fixed", [1, 4])
@pytest.mark.parametrize("rows", [0, 1, 4, 9])
def test_a_fixed_batch_is_split_and_padded(fixed: int, rows: int) -> None:
    session = Counting(doubling(rows=fixed))
    x = torch.randn(rows, 3)
    module = OnnxModule(session)
    assert module.batch == fixed
    torch.testing.assert_close(module(x), 2 * x)
    assert set(session.rows) == {fixed}
    assert len(session.rows) == max(1, -(-rows // fixed))


def test_a_dynamic_batch_is_split_on_request() -> None:
    session, x = Counting(doubling()), torch.randn(10, 3)
    torch.testing.assert_close(OnnxModule(session, batch=4)(x), 2 * x)
    assert session.rows == [4, 4, 4]
    session.rows.clear()
    torch.testing.assert_close(OnnxModule(session)(x.T.contiguous().T), 2 * x)  # not contiguous
    assert session.rows == [10]
    assert OnnxModule(doubling())(torch.zeros(0, 3)).shape == (0, 3)


def test_a_table_that_all_rows_share_is_not_split() -> None:
    x, table = torch.randn(5, 3), torch.randn(3)
    found = OnnxModule(TWO, outputs="scaled", batch=2)(x, x, torch.arange(5), table)
    torch.testing.assert_close(found, x * table)


def test_calls_that_do_not_fit_say_what_would() -> None:
    module, x = OnnxModule(TWO), torch.randn(4, 3)
    with pytest.raises(OnnxError, match=r"takes \['x', 'y', 'ids', 'table'\], got 1 by position"):
        module(x)
    with pytest.raises(OnnxError, match=r"got 0 by position and \['z'\] by name"):
        module(z=x)
    with pytest.raises(OnnxError, match=r"lengths differ: \{'x': 4, 'y': 2, 'ids': 4\}"):
        module(x, x[:2], torch.arange(4), torch.ones(3))
    with pytest.raises(OnnxError, match=r"shape \(4, 5\), but the graph takes x: float\[batch, 3"):
        OnnxModule(doubling())(torch.ones(4, 5))
    with pytest.raises(OnnxError, match="'x' must be a tensor, not list"):
        OnnxModule(doubling())([[1.0]])
    with pytest.raises(ValueError, match=r"no output \['z'\]; the graph has \['sum', 'same'"):
        OnnxModule(TWO, outputs="z")


def test_options_that_do_not_fit_say_what_would(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fixed batch of 4, not 8; export it with a dynamic batch"):
        OnnxModule(doubling(rows=4), batch=8)
    with pytest.raises(ValueError, match="batch must be at least 1, not 0"):
        OnnxModule(doubling(), batch=0)
    with pytest.raises(OnnxError, match=r"no NoneProvider; available: .*CPUExecutionProvider"):
        OnnxModule(doubling(), providers=["NoneProvider"])
    with pytest.raises(ValueError, match="give threads or options, not both"):
        OnnxModule(doubling(), threads=1, options=onnxruntime.SessionOptions())
    session = Counting(doubling())
    with pytest.raises(ValueError, match="are those of the given session"):
        OnnxModule(session, threads=2)
    with pytest.raises(
        TypeError, match=r"a path, bytes or an onnxruntime\.InferenceSession, not int"
    ):
        OnnxModule(3)


def test_files_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.onnx' does not exist; give the path of an"):
        OnnxModule(tmp_path / "none.onnx")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        OnnxModule(tmp_path)
    for name, content in (("text", b"no model"), ("part", doubling()[:40]), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            OnnxError, match=f"ONNX Runtime cannot load '.*{name}': .*Is it a whole"
        ):
            OnnxModule(tmp_path / name)
    with pytest.raises(OnnxError, match="cannot load 3 bytes"):
        OnnxModule(b"abc")


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(optional.MissingPackageError, match=r"needs onnxruntime .*\[onnx\]"):
        OnnxModule(doubling())


def test_a_size_that_the_export_has_fixed_inside_is_explained() -> None:
    content = graph(
        [("Reshape", ["x", "shape"], ["flat"])],
        {"x": (FLOAT, ["batch", 3]), "shape": (LONG, [2])},
        {"flat": (FLOAT, ["rows", 3])},
    )
    with pytest.raises(OnnxError, match=r"failed with inputs x \(4, 3\) float32, .*export again"):
        OnnxModule(content)(torch.ones(4, 3), torch.tensor([2, 3]))
    with pytest.raises(OnnxError, match=r"'flat' has shape \(3, 4\) for 4 rows: the first axis"):
        OnnxModule(content)(torch.ones(4, 3), torch.tensor([3, 4]))


def test_copies_share_the_session_and_pickles_open_it_again(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(doubling())
    x = torch.randn(2, 3)
    for source in (tmp_path / "model.onnx", doubling()):
        module = OnnxModule(source, threads=1)
        model = nn.Sequential(nn.Linear(3, 3), module)
        copied, restored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert copied[1].session is module.session
        assert restored[1].session is not module.session
        for other in (copied, restored):
            torch.testing.assert_close(other(x), model(x))
    session = onnxruntime.InferenceSession(doubling(), providers=["CPUExecutionProvider"])
    assert copy.deepcopy(OnnxModule(session)).session is session
    with pytest.raises(TypeError, match="made from a session, which cannot be pickled"):
        pickle.dumps(OnnxModule(session))


def test_it_has_no_state_and_prints_what_it_takes() -> None:
    module = OnnxModule(doubling())
    assert not module.state_dict()
    assert not list(module.parameters())
    assert "x: float[batch, 3]" in repr(module)
    assert "twice: float[batch, 3]" in repr(module)
    assert "CPUExecutionProvider" in repr(module)
    assert module.session.get_session_options().intra_op_num_threads == torch.get_num_threads()
    assert OnnxModule(doubling(), threads=3).session.get_session_options().intra_op_num_threads == 3


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, of forward mode
def test_derivatives_raise_instead_of_being_zero() -> None:
    module, x = OnnxModule(doubling()), torch.randn(2, 3, requires_grad=True)
    with torch.no_grad():
        assert not module(x).requires_grad
    assert not module(x.detach()).requires_grad
    head = nn.Linear(3, 1)
    with pytest.raises(BackwardError, match="ONNX Runtime session has no backward pass"):
        head(module(x)).sum().backward()
    assert x.grad is None
    head(module(x.detach())).sum().backward()  # what comes after it
    assert head.weight.grad is not None
    with forward_ad.dual_level(), pytest.raises(BackwardError):
        module(forward_ad.make_dual(x.detach(), torch.ones(2, 3)))


def test_integer_outputs_stay_integers() -> None:
    found = OnnxModule(doubling(LONG))(torch.ones(2, 3, dtype=torch.int32))
    assert found.dtype == torch.int64
