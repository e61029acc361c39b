"""Checks of the section profile."""

from __future__ import annotations

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.profile_schema import ProfileConfig


def check_profile(profile: ProfileConfig, world_size: int) -> None:
    """Raise UserError if profile.ranks has a rank that the run does not have, or a setting of the traces has no
    effect."""
    outside = next((rank for rank in profile.ranks or () if rank >= world_size), None)
    if outside is not None:
        last = world_size - 1
        has = "rank 0 alone" if last == 0 else f"ranks 0 to {last}"
        raise UserError(f"profile.ranks has {outside}; a run of {world_size} processes has {has}")
    if not profile.contents:
        return
    given = f"profile.contents is {profile.contents}; that needs"
    if not profile.steps:
        raise UserError(f"{given} profile.steps, which is empty")
    if profile.ranks == []:
        raise UserError(f"{given} traces, and profile.ranks is empty")
