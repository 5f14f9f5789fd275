from tests.trainables.data.conftest import make_folder

__all__ = ["make_folder"]
