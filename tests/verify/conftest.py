import pytest
from verify.verifier import Verifier


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    return Verifier(tmp_path_factory.mktemp("verified"))
