"""Pure state machine of one job: orders and worker events in, actions out."""
