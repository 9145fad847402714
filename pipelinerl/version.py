"""The version of the package, for those below its public interface."""

__version__ = "0.1.0"
