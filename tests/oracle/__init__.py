# SPDX-License-Identifier: MIT
"""Oracles of the delta rule that share no code with the library, and the generator of the shared case list's inputs."""
