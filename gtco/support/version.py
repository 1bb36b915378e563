"""gtco's version: the one place that setup.py, ``gtco --version`` and the artifacts read."""

__version__ = "0.1.0"

PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy", "onnx", "onnxsim", "torch", "onnxruntime")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide how gtco compiles; "none" for a
    package that is not installed.
    """
    import platform  # here, because ``import gtco`` reads this file and does not need them
    from importlib import metadata

    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found
