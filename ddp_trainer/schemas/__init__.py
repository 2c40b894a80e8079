"""The schemas of the config groups, a module each. Import them from `ddp_trainer.config`."""
