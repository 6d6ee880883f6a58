"""Should one speculate at all? What a target, a draft and a device say before anything is decoded."""
