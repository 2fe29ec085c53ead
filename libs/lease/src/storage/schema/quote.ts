/** A quoted schema name as it must stand inside a single-quoted literal, for nextval and the like. */
export const inLiteral = (s: string): string => s.replaceAll("'", "''");
