"""Layouts that every worker knows, and how dims are split, regrouped and spread."""
