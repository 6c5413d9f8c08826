"""First in every Python under `ddpcheck run`: arms the injection, then steps aside for the user's own."""

# Old interpreters (system tools on Python 2 or 3.6) start this file too, so its syntax is the oldest there
# is.
import os
import sys

_FOLDER = os.path.dirname(__file__)


def _arm():
    # type: () -> None
    """Load the very ddpcheck that launched this run, wherever it lives, and arm its injection."""
    if not os.environ.get("DDPCHECK_CONFIG") or sys.version_info < (3, 7) or "ddpcheck" in sys.modules:
        return
    # By location and without sys.path: this environment may hold no ddpcheck, or another version of it, and
    # must not see the packages that happen to be installed next to the one that launched.
    # Put together by hand: importing importlib.util costs more than all the rest of this file.
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


def _step_aside():
    # type: () -> None
    """Leave sys.path as it would be without ddpcheck.

    The folder stays in os.environ["PYTHONPATH"]: that is how spawned and re-executed Pythons are reached,
    and the one difference a program can see.
    """
    sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
    sys.path_importer_cache.pop(_FOLDER, None)
    sys.modules.pop("sitecustomize", None)


try:
    _arm()
except KeyboardInterrupt:
    raise  # the user's Ctrl-C, not a fault of ours
except BaseException as error:
    # Without the package there is no fault file; this line is the only trace a broken installation leaves.
    if os.environ.get("DDPCHECK_DEBUG"):
        sys.stderr.write("ddpcheck: bootstrap failed: %r\n" % (error,))  # noqa: UP031

_step_aside()
# The module this one shadows takes its name and place in sys.modules. What it raises, "not found" included,
# goes to site.py exactly as if it had been imported there.
__import__("sitecustomize")
