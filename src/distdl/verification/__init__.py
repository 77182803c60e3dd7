"""The proof that a distributed program computes what the sequential one does."""

from distdl.verification.certificate import Certificate
from distdl.verification.verify import verify

__all__ = ["Certificate", "verify"]
