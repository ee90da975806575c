# SPDX-License-Identifier: MIT
"""Builds my_gdn against the installed gdn package: pip install --no-build-isolation ."""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

import gdn

setup(
    name="my_gdn",
    version="0.1",
    py_modules=[],
    ext_modules=[
        CppExtension(
            "my_gdn",
            ["my_gdn.cpp"],
            include_dirs=[gdn.include_dir()],
            library_dirs=[gdn.library_dir()],
            libraries=["gdn"],
            runtime_library_dirs=[gdn.library_dir()],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
