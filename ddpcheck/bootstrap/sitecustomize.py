"""Imported first in every Python process under `ddpcheck run`: arms the injection, then imports the user's own."""

# Old interpreters (system tools on Python 2 or 3.6) run this file too, so it uses only syntax that they support.
import os
import sys

_FOLDER = os.path.dirname(__file__)


def _arm():
    # type: () -> None
    """Load the ddpcheck installation that launched this run, and arm its injection."""
    if not os.environ.get("DDPCHECK_CONFIG") or sys.version_info < (3, 7) or "ddpcheck" in sys.modules:
        return
    # Loaded by path, not through sys.path: this environment may contain no ddpcheck or another version, and must not
    # see the packages that are installed next to the one that launched the run.
    # The module is created without importlib.util, whose import takes longer than the rest of this file.
    from importlib.machinery import ModuleSpec, SourceFileLoader

    folder = os.path.dirname(os.path.abspath(_FOLDER))
    loader = SourceFileLoader("ddpcheck", os.path.join(folder, "__init__.py"))
    package = type(sys)("ddpcheck")
    package.__spec__ = ModuleSpec("ddpcheck", loader, origin=loader.path, is_package=True)
    package.__spec__.submodule_search_locations = package.__path__ = [folder]
    package.__spec__.has_location = True
    package.__loader__, package.__package__, package.__file__ = loader, "ddpcheck", loader.path
    sys.modules["ddpcheck"] = package
    try:
        loader.exec_module(package)
        from ddpcheck.injection import arm
    except BaseException:
        sys.modules.pop("ddpcheck", None)
        raise
    arm()


def _restore_sys_path():
    # type: () -> None
    """Leave sys.path as it would be without ddpcheck.

    The folder stays in os.environ["PYTHONPATH"], so that child processes are checked too. This is the only difference
    that a program can see.
    """
    sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
    sys.path_importer_cache.pop(_FOLDER, None)
    sys.modules.pop("sitecustomize", None)


try:
    _arm()
except KeyboardInterrupt:
    raise  # Ctrl-C of the user
except BaseException as error:
    # Without the package no fault file can be written: this line is the only sign of a broken installation.
    if os.environ.get("DDPCHECK_DEBUG"):
        sys.stderr.write("ddpcheck: bootstrap failed: %r\n" % (error,))  # noqa: UP031

_restore_sys_path()
# Import the module that this one shadows. site.py handles its exceptions, including ModuleNotFoundError, as if it had
# imported the module itself.
__import__("sitecustomize")
