/** What must be closed at the end, last opened first, whatever happens to the others. */
export class Cleanup {
  private readonly steps: (() => Promise<void>)[] = [];

  add(step: () => Promise<void>): void {
    this.steps.push(step);
  }

  async run(): Promise<void> {
    for (const step of this.steps.splice(0).reverse()) {
      await step().catch((error: unknown) => {
        process.stderr.write(`At the end: ${error instanceof Error ? error.message : String(error)}\n`);
      });
    }
  }
}
