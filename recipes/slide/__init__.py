"""SLIDE's pipeline (`docs/slide.md`): semantic IDs, teacher, lists, student, comparison."""
