"""What a run would take, worked out before it starts: layout, memory, bytes on the wire, time.

Nothing is allocated: the model's forward and backward pass run on torch's meta device.
"""
