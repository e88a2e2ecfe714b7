"""Build the optional C++ extension of the data path.

Without a compiler the install succeeds and NumPy does the work.

All metadata is in pyproject.toml.
"""

from setuptools import Extension, setup


def extensions() -> list[Extension]:
    """Return the extension, or nothing if pybind11 is not installed."""
    try:
        from pybind11.setup_helpers import Pybind11Extension
    except ImportError as error:
        print(f"No C++ index helpers ({error}): the slower NumPy ones will be used.")
        return []
    return [
        Pybind11Extension(
            "megatron.data._index_helpers",
            ["megatron/data/csrc/index_helpers.cpp"],
            cxx_std=17,
            # Fused multiply-add would round the shares of a mixture differently from NumPy.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]


def build_command() -> dict[str, type]:
    """Return a build_ext that reports a missing or failing compiler in one line and continues."""
    from setuptools.command.build_ext import build_ext

    class OptionalBuild(build_ext):
        def build_extension(self, ext: Extension) -> None:
            try:
                super().build_extension(ext)
            # The types of a compiler's errors differ by platform. None may stop the installation.
            except Exception as error:
                print(
                    f"C++ index helpers were not built ({type(error).__name__}: {error}): "
                    "the slower NumPy ones will be used."
                )

    return {"build_ext": OptionalBuild}


setup(ext_modules=extensions(), cmdclass=build_command())
