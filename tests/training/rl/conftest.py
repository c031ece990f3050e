"""Data sets that Minari keeps, recorded in a moment, in a folder of the tests' own."""

from pathlib import Path

import pytest

pytest.importorskip("minari")
pytest.importorskip("gymnasium")

from polyformer.training.rl.recording import Recording, record


@pytest.fixture(scope="session")
def minari_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data sets `cart/mixed-v0` and `pendulum/short-v0`."""
    root = tmp_path_factory.mktemp("minari")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(root))
        record(Recording(environment="CartPole-v1", out="cart/mixed-v0", episodes=24, max_steps=30))
        policies = ("scripted", "random")
        record(
            Recording(
                environment="Pendulum-v1",
                out="pendulum/short-v0",
                policies=policies,
                episodes=12,
                max_steps=12,
            )
        )
    return root


@pytest.fixture
def minari_here(minari_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder, where Minari looks."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(minari_root))
    return minari_root
