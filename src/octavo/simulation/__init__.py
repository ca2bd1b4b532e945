"""The real engine on a virtual clock: a cost model stands for the device."""
