"""Imports some files of a framework from its unpacked archive, and makes stand-ins of all its other modules.

A serving framework with what it needs is too large for a test. Its classes that an adapter of epmoe extends
are in a few files, which import much that the test does not run. So those files are loaded as they are, and
every other module of the framework is a _Mock.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import unittest.mock
from pathlib import Path

import pytest


class _Mock(types.ModuleType):
    """A module in which every name is a MagicMock, but for the framework's own files, which are imported."""

    def __init__(self, name, own):
        super().__init__(name)
        self.__dict__["_own"] = own

    def __getattr__(self, name):
        if f"{self.__name__}.{name}" in self._own or name.startswith("__"):
            raise AttributeError(name)
        value = self.__dict__[name] = unittest.mock.MagicMock()
        return value


class Source(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The files of a framework.

    Args:
        package: Its top-level package.
        variable: The environment variable that names the folder which contains the package.
        own: The modules to load from there.
    """

    def __init__(self, package, variable, own):
        self.package, self.variable, self.own = package, variable, own

    def folder(self):
        """Return the folder, or None."""
        return os.environ.get(self.variable)

    def need(self):
        """Skip the test without the folder."""
        if not self.folder():
            pytest.skip(f"{self.variable} is not set: the classes of {self.package} itself are not tested "
                        f"(tests/framework_source.py)")

    def load(self):
        """Make the modules importable in this process."""
        if not Path(self.folder(), self.package).is_dir():
            raise FileNotFoundError(f"{self.variable}={self.folder()}: no folder {self.package} in it")
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name in self.own:
            file = Path(self.folder(), *name.split("."))
            if file.is_dir():
                return importlib.util.spec_from_file_location(name, file / "__init__.py",
                                                              submodule_search_locations=[])
            return importlib.util.spec_from_file_location(name, file.with_suffix(".py"))
        if name.split(".")[0] == self.package:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Mock(spec.name, self.own)

    def exec_module(self, module):
        pass


def add_module(name, **contents):
    """Make a stand-in for a module, with these contents, and for the packages that contain it."""
    parent, _, last = name.rpartition(".")
    if parent and parent not in sys.modules:
        add_module(parent)
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(contents)
    if parent:
        setattr(sys.modules[parent], last, module)
    return module
