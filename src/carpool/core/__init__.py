"""Pure scheduling core: model, policy interface, scheduler and journal; standard library only, deterministic."""
