"""gtco's version: the one place that setup.py, ``gtco --version`` and the artifacts read."""

__version__ = "0.1.0"

PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy", "onnx", "onnxsim", "torch", "onnxruntime")


def installed(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    from importlib import metadata  # here, because ``import gtco`` reads this file

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide how gtco compiles; "none" for a
    package that is not installed.
    """
    import platform  # here, because ``import gtco`` does not need it

    packages = {name: installed(name) or "none" for name in PACKAGES}
    return {"Python": platform.python_version(), **packages}
