"""Post-training: traces and rollouts with their readers, trees of answers with a common prompt,
rewards and losses.
"""
