"""Puts scheduler, runner and tokenizer together."""
