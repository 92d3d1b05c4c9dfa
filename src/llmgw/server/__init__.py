"""The control plane's half: tree.py joins the rooms, scheduler.py feeds the fleet, gateway.py answers the door."""
