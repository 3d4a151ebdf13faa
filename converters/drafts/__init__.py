"""Published drafting heads: their packagings, their configs, whether one fits a target. Start reading at `checkpoint`."""
