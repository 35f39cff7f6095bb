"""Text to video: Wan's transformer learns on latents and text that are encoded beforehand."""
