from raytrec.cli import main

main()
