import pytest
import same


@pytest.fixture(scope="module", autouse=True)
def lasting_worlds():
    """The tests of a file share the worlds in which ``assert_same`` compares."""
    yield
    for world in same.WORLDS.values():
        world.close()
    same.WORLDS.clear()
