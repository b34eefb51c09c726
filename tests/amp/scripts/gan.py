"""In the style of Apex's example of a generative adversarial network: two models, two optimizers, three losses."""

import torch
from apex import amp

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(3)
netG = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
netD = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.LeakyReLU(0.2), torch.nn.Linear(32, 1))
netG, netD = netG.to(device), netD.to(device)
criterion = torch.nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))

[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level="O1", num_losses=3
)

for _ in range(150):
    netD.zero_grad()
    real = torch.tensor([2.0, -1.0], device=device) + 0.1 * torch.randn(64, 2, device=device)
    ones, zeros = torch.ones(64, 1, device=device), torch.zeros(64, 1, device=device)
    errD_real = criterion(netD(real), ones)
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()
    fake = netG(torch.randn(64, 8, device=device))
    errD_fake = criterion(netD(fake.detach()), zeros)
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    optimizerD.step()

    netG.zero_grad()
    errG = criterion(netD(fake), ones)
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()
    print("loss", float((fake.detach().mean(0) - real.mean(0)).norm()))
